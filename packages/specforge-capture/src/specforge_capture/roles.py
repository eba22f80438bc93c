"""Who works on a run's ledger: one producer and one trainer, each known by a lock that the kernel takes back
when its process ends, however it ends.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

Role = Literal["producer", "trainer"]
_LOCK_SECONDS = 5.0  # a process that was killed a moment ago holds its lock until it is gone


class RoleLock:
    """Holds a role in a run's folder until it is closed or the process ends.

    Raises:
        ValueError: if another process holds it.
    """

    def __init__(self, folder: Path, role: Role) -> None:
        self._file = open(_path(folder, role), "a+")  # noqa: SIM115
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = self._file.read().strip() or "?"
                self._file.close()
                raise ValueError(
                    f"{folder} already has a running {role}, process {holder}: wait for it, or stop it"
                )
            time.sleep(0.05)
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def close(self) -> None:
        """Give the role back."""
        self._file.close()


def is_taken(folder: Path, role: Role) -> bool:
    """Whether a process holds a role now."""
    with open(_path(folder, role), "a") as file:
        return not _locked(file, fcntl.LOCK_SH)


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Wait until no other process is in this context of the folder."""
    with open(_path(folder, "ledger"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _path(folder: Path, name: str) -> Path:
    return folder / f".lock.{name}"


def _locked(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
