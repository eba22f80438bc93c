"""A long row through sink, store and fetcher, in processes of their own."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
# 0.38 GiB in pieces of 1,365 rows, through a ring and a buffer of 32 MiB.
SMALL = ["--rows", "32768", "--hidden-size", "1024", "--chunk", "512", "--ring-bytes", str(32 << 20)]
HALF_A_SAMPLE = 0.19
LINE = re.compile(
    r"(?P<part>\w+) +\S+ s +\S+ GiB/s  peak resident \S+ GiB, (?P<gained>\S+) of it since it began"
)


@pytest.mark.parametrize("store", ["files", "mooncake"])
def test_a_row_passes_in_pieces(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if store == "mooncake" and find_spec("mooncake") is None:
        raise pytest.skip.Exception("needs Mooncake: specforge-capture[mooncake]")
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr("sys.argv", ["bench_store.py", *SMALL, "--store", store, "--folder", str(tmp_path)])
    importlib.import_module("bench_store").main()
    gained = {found["part"]: float(found["gained"]) for found in LINE.finditer(capsys.readouterr().out)}
    assert gained.keys() == {"capture", "fetch"}
    assert gained["fetch"] < HALF_A_SAMPLE
    if store == "files":  # Mooncake's objects lie in the memory of who captures
        assert gained["capture"] < HALF_A_SAMPLE
    assert list(tmp_path.iterdir()) == []
