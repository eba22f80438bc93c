"""What SGLang leaves in shared memory: it ends its processes by SIGKILL, so nobody unlinks what they mapped.

Read while a server runs, removed once it is gone. Without /proc (not Linux) nothing is found.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = "/dev/shm/"
_PROCESSES = Path("/proc")
_TICK_SECONDS = 0.05


def mapped_by_group(group: int) -> set[Path]:
    """Files in shared memory that a process group maps.

    Args:
        group: id of the group.
    """
    return {path for process in _processes() if _group(process) == group for path in _mapped(process)}


def remove_unmapped(paths: Iterable[Path], seconds: float = 5.0) -> None:
    """Remove files that no process maps any more; what is gone already is fine.

    Args:
        paths: the files.
        seconds: how long to wait for killed processes to be gone; what is mapped even then stays.
    """
    left, deadline = set(paths), time.monotonic() + seconds
    while left:
        used = {path for process in _processes() for path in _mapped(process)}
        for path in left - used:
            path.unlink(missing_ok=True)
        left &= used
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


def _mapped(process: Path) -> set[Path]:
    """Segments of shared memory that a process maps; empty if it has ended or is another user's."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    # Segments lie in no folder of that folder, unlike files that somebody keeps there.
    names = (line.partition(FOLDER)[2] for line in lines if FOLDER in line)
    return {Path(FOLDER + name) for name in names if "/" not in name and not name.endswith(" (deleted)")}
