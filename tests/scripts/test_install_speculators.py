import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--wrong", 2)])
def test_help_and_mistakes_install_nothing(
    argument: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("install_speculators")
    monkeypatch.setattr(script, "FOLDER", tmp_path / "speculators")
    monkeypatch.setattr("sys.argv", ["install_speculators.py", argument])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == code
    told = capsys.readouterr()
    assert "install_speculators.py" in told.out + told.err
    assert not (tmp_path / "speculators").exists()
