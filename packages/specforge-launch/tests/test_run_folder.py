import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specforge_launch.run_folder import Follower, RunFolder

HOLD = """
import sys, time
from specforge_launch.run_folder import RunFolder
with RunFolder(sys.argv[1]).lock("node0"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_by_name_and_free_once_its_user_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specforge_capture.locks._GONE_SECONDS", 0.2)
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(ValueError, match=f"in use by the run of process {holder.pid}"),
            RunFolder(tmp_path).lock("node0"),
        ):
            pass
        with RunFolder(tmp_path).lock("node1"):  # another node's
            pass
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate(timeout=10)
    with RunFolder(tmp_path).lock("node0") as lock:
        lock.seek(0)
        assert lock.read() == str(os.getpid())


def test_clearing_keeps_checkpoints_and_results(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    kept = (
        folder.checkpoints / "step-000004" / "meta.json",
        folder.summary,
        folder.metrics,
        folder.untrained,
    )
    gone = (
        folder.stop,
        folder.progress,
        folder.errors / "rank-0.json",
        folder.errors / "rank-3.json",  # of another node, or of a run of more ranks
        folder.exits(0),
        folder.exits(1),
        folder.error("producer"),
    )
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    folder.clear(["producer"])
    folder.clear_node(0)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)
    assert folder.has_checkpoint


def test_a_follower_reads_whole_lines_from_where_it_began(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert Follower(path).lines() == []
    path.write_text("before\n")
    follower = Follower(path)
    with path.open("a") as file:
        file.write("one\ntwo\nthr")
        file.flush()
        assert follower.lines() == ["one", "two"]
        assert follower.lines() == []
        file.write("ee\n")
        file.flush()
        assert follower.lines() == ["three"]
        file.write("loading 0%\rloading 50%\rloading 100%\nby\u2028word\n")
        file.flush()
        assert follower.lines() == ["loading 100%", "by\u2028word"]
    path.write_text("anew\n")
    assert follower.lines() == ["anew"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = RunFolder(tmp_path / "file" / "run")
    with pytest.raises(ValueError, match=r"output_dir: cannot write .*file/run"), folder.lock("node0"):
        pass
