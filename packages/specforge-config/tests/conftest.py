from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a recipe beside a target folder, a training file and a held-out file."""
    (tmp_path / "target").mkdir()
    for name in ("train.jsonl", "other.jsonl", "held-out.jsonl"):
        (tmp_path / name).touch()

    def write(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(dedent(text))
        return path

    return write
