"""Who works on a run's ledger: one producer and one trainer, each known by a lock that the kernel takes back
when its process ends, however it ends.
"""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from specforge_capture.locks import hold, try_lock

Role = Literal["producer", "trainer"]


def take(folder: Path, role: Role) -> TextIO:
    """Hold a role in a run's folder until the file is closed or the process ends.

    Raises:
        ValueError: if another process holds it.
    """
    return hold(
        _path(folder, role),
        lambda holder: f"{folder} already has a running {role}, process {holder}: wait for it, or stop it",
    )


def is_taken(folder: Path, role: Role) -> bool:
    """Whether a process holds a role now."""
    with open(_path(folder, role), "a") as file:
        return not try_lock(file, fcntl.LOCK_SH)


@contextmanager
def alone(folder: Path) -> Generator[None]:
    """Wait until no other process is in this context of the folder."""
    with open(_path(folder, "ledger"), "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _path(folder: Path, name: str) -> Path:
    return folder / f".lock.{name}"
