import os
from pathlib import Path

import pytest

from specforge_kernels.inductor import keep_compiled


def test_compiled_kernels_outlive_the_run_where_the_user_wants_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "elsewhere"}
    monkeypatch.setattr(os, "environ", environment)
    keep_compiled()
    assert environment["TRITON_CACHE_DIR"] == "elsewhere"
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "specforge" / "inductor")
