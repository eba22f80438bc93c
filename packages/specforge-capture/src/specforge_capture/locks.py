"""One builder for what several processes need: a lock that ends with its holder, and a sign of life.

The builder holds an exclusive `flock`, which the kernel releases when it dies, so a killed builder's place is
free at once. The others poll: no collective ever waits for a build. The builder's heartbeat, the lock file's
time of change, bounds their wait.
"""

import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

POLL_SECONDS = 0.1


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
