"""Locks that end with their holder, however it ends: of a place, and of the one builder of what several need.

A lock is an exclusive `flock`, which the kernel releases when its holder dies, so a killed one's place is
free at once. Those that wait for a builder poll: no collective ever waits for a build. The builder's
heartbeat, the lock file's time of change, bounds their wait.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

POLL_SECONDS = 0.1
_GONE_SECONDS = 5.0  # a process that was killed a moment ago holds its lock until it is gone


def hold(path: Path, taken: Callable[[str], str]) -> TextIO:
    """Hold the lock of a file, in which this process is named, until the last process that has it open ends.

    Args:
        path: the file.
        taken: says what is wrong, given the process that holds it.

    Raises:
        ValueError: with what `taken` says, if another process holds it.
    """
    file, deadline = path.open("a+"), time.monotonic() + _GONE_SECONDS
    while not try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read().strip() or "?"
            file.close()
            raise ValueError(taken(holder))
        time.sleep(POLL_SECONDS / 2)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def try_lock(file: TextIO, kind: int) -> bool:
    """Take a lock, `LOCK_EX` or `LOCK_SH`, unless another process keeps it from being taken."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def builder_lock(path: Path, what: str, setting: str, stall_seconds: float) -> Generator[Callable[[], None]]:
    """Hold the builder's place; yields a function that tells waiting processes that this one still works.

    Args:
        path: the lock file.
        what: is built, for messages.
        setting: names the folder, for messages.
        stall_seconds: how long another builder may show no sign of life.

    Raises:
        ValueError: if another builder shows none for so long, or the file system has no locks.
    """
    with path.open("a+") as file:
        _acquire(file, path, what, setting, stall_seconds)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
        yield lambda: os.utime(path)


def _acquire(file: TextIO, path: Path, what: str, setting: str, stall_seconds: float) -> None:
    beat, seen = 0.0, time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        except OSError as error:
            raise ValueError(
                f"{setting}: the file system of {path.parent} has no file locks ({error.strerror}): "
                f"set {setting} to one that has"
            ) from error
        if (latest := path.stat().st_mtime) != beat:
            beat, seen = latest, time.monotonic()
        if time.monotonic() - seen > stall_seconds:
            raise ValueError(
                f"{path}: {path.read_text().strip()} builds {what}, but shows no progress for "
                f"{stall_seconds:.0f} s: end it and start again"
            )
        time.sleep(POLL_SECONDS)
