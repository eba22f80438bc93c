import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from specforge_capture.stores import files
from specforge_capture.stores.base import MissingObject, ShortObject, StoreError, StoreFull, open_store
from specforge_capture.stores.files import Files
from specforge_config.store import FileStore


def store_in(folder: Path, capacity: int | None = None) -> Files:
    return Files(FileStore(kind="files", folder=str(folder), capacity_bytes=capacity))


def test_a_truncated_file_is_told(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.put([("run/0-0-0/0", torch.arange(100))])
    file = next(path for path in tmp_path.iterdir() if path.name != ".lock")
    os.truncate(file, 799)
    with pytest.raises(ShortObject, match="'run/0-0-0/0' has 799 bytes; required: 800"):
        store.get_into([("run/0-0-0/0", torch.zeros(100, dtype=torch.int64))])


def test_keys_become_names_inside_the_folder(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    store.put([("../../outside", torch.ones(1)), ("/absolute", torch.ones(1)), ("ü %2F", torch.ones(1))])
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert store.remove_prefix("") == 3
    assert [path.name for path in (tmp_path / "store").iterdir()] == [".lock"]


def test_the_capacity_counts_all_writers_and_what_is_being_written(tmp_path: Path) -> None:
    first, second = store_in(tmp_path, 1000), store_in(tmp_path, 1000)
    first.put([("a/0", torch.zeros(600, dtype=torch.uint8))])
    with pytest.raises(StoreFull, match=r"no room for 500 bytes: 600 of store\.capacity_bytes 1000"):
        second.put(
            [("b/0", torch.zeros(250, dtype=torch.uint8)), ("b/1", torch.zeros(250, dtype=torch.uint8))]
        )
    second.put([("a/0", torch.zeros(1000, dtype=torch.uint8))])  # in place of the first
    (tmp_path / "c%2F0.0.partial").write_bytes(b"x")
    with pytest.raises(StoreFull, match="1001 of"):
        first.put([("d/0", torch.zeros(1, dtype=torch.uint8))])
    assert not any(path.name.startswith(("b", "d")) for path in tmp_path.iterdir())


def test_a_full_disk_is_a_full_store(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit on the length of files stands for the disk: a write beyond it fails like one without space.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StoreFull, match="big%2F0"):
            store.put([("big/0", torch.zeros(500))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(MissingObject):
        store.get_into([("big/0", torch.zeros(500))])


def test_a_killed_writer_leaves_nothing_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tensor = store_in(tmp_path), torch.zeros(500)

    def die(descriptor: int, view: memoryview) -> None:
        os.write(descriptor, view[:100])
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(files, "_write", die)
    if (child := os.fork()) == 0:
        store.put([("run/0", tensor)])
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(list(tmp_path.glob("*.partial"))) == 1
    with pytest.raises(MissingObject):
        store.get_into([("run/0", tensor)])
    assert store.remove_prefix("run/") == 0
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = FileStore(kind="files", folder=str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match=r"store\.folder .*/file/store cannot be written"):
        open_store(config, contribute=True)
