"""The `patch` command on a small tree, as its users run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specforge_capture import patching
from specforge_capture.cli import app

PATCH = """\
Change a file

diff --git a/sglang/a.py b/sglang/a.py
--- a/sglang/a.py
+++ b/sglang/a.py
@@ -1 +1 @@
-a = 1
+a = 2
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site, patches = tmp_path / "site", tmp_path / "patches"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang/__init__.py").touch()
    (site / "sglang/a.py").write_text("a = 1\n")
    (site / "sglang-0.5.14.dist-info").mkdir()
    (site / "sglang-0.5.14.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.14\n")
    (patches / "0.5.14").mkdir(parents=True)
    (patches / "0.5.14/0001-change.patch").write_text(PATCH)
    patching.make_manifest(patches / "0.5.14", site)
    monkeypatch.setattr(patching, "PATCHES", patches)
    return site


def run(command: str, site: Path) -> Result:
    return CliRunner().invoke(app, ["patch", command, "--site", str(site)])


def test_status_check_apply_revert(site: Path) -> None:
    def line(command: str) -> str:
        result = run(command, site)
        assert result.exit_code == 0, result.output
        return result.output.removeprefix(f"sglang 0.5.14 in {site}: ")

    assert line("status") == "not patched\n  0001-change: Change a file\n  stock    sglang/a.py\n"
    assert line("check") == "files to change: 1\n"
    assert (site / "sglang/a.py").read_text() == "a = 1\n"
    assert line("apply") == "patched, files changed: 1\n"
    assert (site / "sglang/a.py").read_text() == "a = 2\n"
    assert line("apply") == "patched, nothing to do\n"
    assert line("check") == "nothing to do\n"
    assert line("status").startswith("patched\n")
    assert line("revert") == "not patched, files changed: 1\n"
    assert (site / "sglang/a.py").read_text() == "a = 1\n"


def test_a_modified_tree_shows_and_fails(site: Path) -> None:
    (site / "sglang/a.py").write_text("a = 3\n")
    shown = run("status", site)
    assert shown.exit_code == 0
    assert "not as released" in shown.output
    assert "modified sglang/a.py" in shown.output
    for command in ("check", "apply", "revert"):
        failed = run(command, site)
        assert isinstance(failed.exception, ValueError)
        assert "sglang/a.py is modified" in str(failed.exception)


MAIN = """
import sys
from pathlib import Path
from specforge_capture import cli, patching

patching.PATCHES = Path(sys.argv.pop(1))
cli.main()
"""


def test_a_place_that_cannot_be_written_stays_as_it_is(site: Path) -> None:
    as_user = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []  # root writes anywhere
    command = [*as_user, sys.executable, "-c", MAIN, patching.PATCHES, "patch", "apply", "--site", site]
    (site / "sglang").chmod(0o555)
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"error: {site} cannot be changed, and is as it was: ")
    assert sorted(path.name for path in (site / "sglang").iterdir()) == ["__init__.py", "a.py"]
    assert (site / "sglang/a.py").read_text() == "a = 1\n"
    (site / "sglang").chmod(0o755)
    subprocess.run(command, check=True, timeout=60)
    (site / "sglang").chmod(0o555)
    again = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert again.stdout.endswith("patched, nothing to do\n")
