"""Shared memory of killed processes is found while they run and removed afterwards, and nobody else's."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from specforge_capture.sglang.leftovers import FOLDER, mapped_by_group, remove_unmapped

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and /dev/shm")
HOLDER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(path: Path, program: Path | None = None) -> Generator[subprocess.Popen[str]]:
    """A process group of its own that maps a file until it is killed."""
    code = [str(program)] if program else ["-c", HOLDER]
    with subprocess.Popen(
        [sys.executable, *code, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "mapped\n"
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def segment() -> Generator[Path]:
    path = Path(f"{FOLDER}sgl_shm_test_{uuid4().hex}")
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def test_what_a_killed_group_mapped_is_removed(segment: Path) -> None:
    with holder(segment) as process:
        found = mapped_by_group(process.pid)
        assert segment in found
    remove_unmapped(found)
    assert not segment.exists()
    remove_unmapped(found)


def test_semaphores_are_found_and_other_files_are_not(tmp_path: Path, segment: Path) -> None:
    other = segment.with_name(f"somebody_{segment.name}")
    other.write_bytes(bytes(16))
    program = tmp_path / "program.py"
    program.write_text(
        f"import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()\nexec({HOLDER!r})\n"
    )
    with holder(other, program) as process:
        found = mapped_by_group(process.pid)
    try:
        assert [path.name[:7] for path in found] == ["sem.mp-"]
        remove_unmapped(found)
        assert not any(path.exists() for path in found)
        assert other.exists()
    finally:
        other.unlink()


def test_what_another_process_maps_stays(segment: Path) -> None:
    with holder(segment), holder(segment) as other:
        remove_unmapped(mapped_by_group(other.pid), seconds=0.2)
        assert segment.exists()


def test_a_group_that_is_gone_maps_nothing(segment: Path) -> None:
    with holder(segment) as process:
        pass
    assert mapped_by_group(process.pid) == set()
