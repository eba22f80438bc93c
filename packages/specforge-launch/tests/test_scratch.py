import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from specforge_launch.scratch import Scratch, sweep

LAUNCHER = """
import subprocess, sys
from specforge_launch.scratch import Scratch
scratch = Scratch()
child = subprocess.Popen(["sleep", "300"], pass_fds=(scratch.lock,)) if sys.argv[1:] else None
print(scratch.path, child and child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def launchers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def launch(launchers: list[subprocess.Popen[str]], *arguments: str) -> tuple[Path, str]:
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    launchers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert launchers[-1].stdout is not None
    path, child = launchers[-1].stdout.readline().split()
    return Path(path), child


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)


def test_the_folder_of_a_killed_launcher_is_removed_and_no_other(
    place: Path, launchers: list[subprocess.Popen[str]]
) -> None:
    living, (dead, _) = Scratch(), launch(launchers)
    (dead / "socket").touch()
    of_another_program = place / "specforge-notes"
    of_another_program.mkdir()
    sweep()
    assert dead.is_dir()
    kill(launchers[0])
    sweep()
    assert not dead.exists()
    assert living.path.is_dir()
    assert of_another_program.is_dir()
    living.remove()
    assert not living.path.exists()


def test_a_process_that_outlives_its_launcher_keeps_its_folder(
    launchers: list[subprocess.Popen[str]],
) -> None:
    path, child = launch(launchers, "with a child")
    kill(launchers[0])
    sweep()
    assert path.is_dir()
    subprocess.run(["kill", "-KILL", child], check=True)
    for _ in range(600):
        sweep()
        if not path.exists():
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert not path.exists()
