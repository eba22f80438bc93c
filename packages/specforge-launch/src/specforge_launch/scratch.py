"""Temporary folders of the processes beside the ranks, where SGLang leaves its sockets.

Invariant: a folder's lock is held by the launcher that made it and by the process that it is for. Where
nobody holds it they were killed, and the next launcher removes the folder.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from specforge_capture.locks import try_lock

_PREFIX, _HOLDER = "specforge-", ".holder"


class Scratch:
    """A new folder, held until `remove` or the end of this process and of those that take `lock` over."""

    def __init__(self) -> None:
        """Make the folder. Its lock gets its name once it is held: no sweep can come between."""
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        new = self.path / f"{_HOLDER}.new"
        self._file = new.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.rename(new, self.path / _HOLDER)

    @property
    def lock(self) -> int:
        """Descriptor of the lock, for the process that the folder is for."""
        return self._file.fileno()

    def remove(self) -> None:
        """Remove the folder with what lies in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def sweep() -> None:
    """Remove the folders that nobody holds any more."""
    for holder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_HOLDER}"):
        with suppress(OSError), holder.open("r+") as file:  # another launcher may be quicker
            if try_lock(file, fcntl.LOCK_EX):
                shutil.rmtree(holder.parent, ignore_errors=True)
