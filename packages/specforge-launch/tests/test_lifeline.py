import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CHILD = """
import time
from specforge_launch.lifeline import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, time
from specforge_launch import lifeline
lifeline.die_with_parent()
options = {"env": lifeline.environment(), "start_new_session": True, "stdout": subprocess.PIPE, "text": True}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], **options)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_parent_takes_its_child_with_it() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    environment = {**os.environ, "SPECFORGE_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, timeout=20, check=False
    )
    assert child.returncode == 1
    assert child.stdout == b""


TIDY = """
import signal, sys, time
from specforge_launch.lifeline import stop_with_parent
stop_with_parent()
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
print("up", flush=True)
while len(asked) < 2:
    time.sleep(0.02)
open({path!r}, "w").write("put away")
"""


def test_a_child_with_something_to_put_away_is_asked_twice(tmp_path: Path) -> None:
    path = tmp_path / "done"
    program = [sys.executable, "-c", PARENT, TIDY.format(path=str(path))]
    parent = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=10)
    deadline = time.monotonic() + 20
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)
    assert path.read_text() == "put away"
