import hashlib
import re
from pathlib import Path

import pytest

from specforge_capture.prompts.checksum import require_checksum
from specforge_config.data import DataConfig


def test_only_the_file_with_the_required_checksum_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    require_checksum(DataConfig(train=(str(path),), sha256=right))
    require_checksum(DataConfig(train=(str(path),)))
    path.write_text('{"text": "b"}\n')
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"its sha256 is {found}, but data.sha256 requires {right}"):
        require_checksum(DataConfig(train=(str(path),), sha256=right))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=re.escape(path)):
        require_checksum(DataConfig(train=(path,), sha256="0" * 64))
