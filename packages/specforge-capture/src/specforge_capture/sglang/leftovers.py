"""What SGLang leaves in shared memory: it ends its processes by SIGKILL, so nobody unlinks what they mapped.

Read while a server runs, removed once it is gone. Only names of SGLang and multiprocessing are touched.
Files are found by inode, as a semaphore is mapped under another name. Without /proc nothing is found.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = "/dev/shm/"
NAMES = ("sgl_shm_", "sglang_loads_", "sem.mp-")
_PROCESSES = Path("/proc")
_TICK_SECONDS = 0.05


def mapped_by_group(group: int) -> set[Path]:
    """Files in shared memory that a process group maps.

    Args:
        group: id of the group.
    """
    inodes = {inode for process in _processes() if _group(process) == group for inode in _mapped(process)}
    return {path for path, inode in _named().items() if inode in inodes}


def remove_unmapped(paths: Iterable[Path], seconds: float = 5.0) -> None:
    """Remove files that no process maps any more; what is gone already is fine.

    Args:
        paths: the files.
        seconds: how long to wait for killed processes to be gone; what is mapped even then stays.
    """
    left, deadline = set(paths), time.monotonic() + seconds
    while left:
        named, inodes = _named(), {inode for process in _processes() for inode in _mapped(process)}
        used = {path for path in left if named.get(path) in inodes}
        for path in left - used:
            path.unlink(missing_ok=True)
        left = used
        if time.monotonic() > deadline:
            return
        time.sleep(_TICK_SECONDS)


def _processes() -> Iterator[Path]:
    return (entry for entry in _PROCESSES.glob("[0-9]*"))


def _group(process: Path) -> int | None:
    """Process group; None if it has ended."""
    try:
        # The name, in parentheses, may hold anything; behind it come state, parent and group.
        return int((process / "stat").read_text().rpartition(")")[2].split()[2])
    except (OSError, ValueError, IndexError):
        return None


def _mapped(process: Path) -> set[int]:
    """Inodes of shared memory that a process maps; empty if it has ended or is another user's."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {int(line.split(maxsplit=5)[4]) for line in lines if FOLDER in line}


def _named() -> dict[Path, int]:
    """Inode of each file in shared memory that may be SGLang's."""
    with suppress(FileNotFoundError), os.scandir(FOLDER) as entries:
        return {Path(entry.path): entry.inode() for entry in entries if entry.name.startswith(NAMES)}
    return {}
