"""The file store: a file an object in one folder that servers and trainer ranks all see.

Invariants:
- Files appear whole: written under another name, then renamed. A killed writer leaves only a partial file,
  which no reader opens and `remove_prefix` removes.
- Nothing is synced to the disk. Features can be captured again, so what a crash of the machine loses is
  re-captured like any missing object, while waiting for the disk would bound every capture by it. Processes
  of one machine share its page cache, and on a network file system closing a file is what makes it visible
  to the next open elsewhere. A file that a crash left short or empty is told by its length, one with the
  right length and other bytes by the ref's checksum.
"""

import errno
import fcntl
import os
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from torch import Tensor

from specforge_capture.stores.base import MissingObject, ShortObject, StoreError, StoreFull
from specforge_capture.stores.memory import host_view
from specforge_config.store import FileStore

_PARTIAL = ".partial"
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Files:
    """A feature store in a folder; see `FeatureStore`.

    Args:
        config: the settings.

    Raises:
        StoreError: if the folder cannot be written.
    """

    def __init__(self, config: FileStore) -> None:
        self.folder = Path(config.folder)
        self._capacity = config.capacity_bytes
        self._closed = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _LOCK).touch()
        except OSError as error:
            raise StoreError(f"store.folder {self.folder} cannot be written: {error}") from error

    def put(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """See `FeatureStore`."""
        self._require_open()
        views = {_name(key): host_view(tensor) for key, tensor in objects}
        partials = {name: self.folder / f"{name}.{uuid4().hex}{_PARTIAL}" for name in views}
        with _errors_named(f"writing {list(views)[:3]}"):
            try:
                self._reserve({partials[name]: len(view) for name, view in views.items()}, views.keys())
                for name, view in views.items():
                    with open(partials[name], "r+b", buffering=0) as file:
                        _write(file.fileno(), view)
                    os.replace(partials[name], self.folder / name)
            finally:
                for partial in partials.values():
                    partial.unlink(missing_ok=True)

    def get_into(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """See `FeatureStore`."""
        self._require_open()
        for key, tensor in objects:
            view = host_view(tensor)
            with _errors_named(f"reading {key!r}"):
                try:
                    file = open(self.folder / _name(key), "rb", buffering=0)  # noqa: SIM115
                except FileNotFoundError:
                    raise MissingObject(f"no object {key!r} in {self.folder}") from None
                with file:
                    found = os.fstat(file.fileno()).st_size
                    if found == len(view):
                        found = _read(file.fileno(), view)
            if found != len(view):
                raise ShortObject(f"object {key!r} has {found} bytes; required: {len(view)}")

    def remove(self, keys: Sequence[str]) -> None:
        """See `FeatureStore`."""
        self._require_open()
        with _errors_named(f"removing {list(keys)[:3]}"):
            for key in keys:
                (self.folder / _name(key)).unlink(missing_ok=True)

    def remove_prefix(self, prefix: str) -> int:
        """See `FeatureStore`. Partial files of killed writers go too."""
        self._require_open()
        start, removed = quote(prefix, safe=""), 0
        with _errors_named(f"removing what begins with {prefix!r}"):
            for name in os.listdir(self.folder):
                if name.startswith(start) and name != _LOCK:
                    (self.folder / name).unlink(missing_ok=True)
                    removed += not name.endswith(_PARTIAL)
        return removed

    def register(self, buffer: Tensor) -> None:
        """Nothing to do: files are written from and read into any memory."""
        self._require_open()

    def unregister(self, buffer: Tensor) -> None:
        """Nothing to do."""
        self._require_open()

    def close(self) -> None:
        """See `FeatureStore`. The objects stay."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store in {self.folder} is closed")

    def _reserve(self, sizes: dict[Path, int], replaced: Collection[str]) -> None:
        """Make partial files of their final lengths, which count as taken while they are written.

        Raises:
            StoreFull: if the capacity does not hold them beside what is there without the files `replaced`.
        """
        with open(self.folder / _LOCK, "rb") as lock:
            if self._capacity is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released with the file
                used, wanted = self._used_bytes(replaced), sum(sizes.values())
                if used + wanted > self._capacity:
                    raise StoreFull(
                        f"no room for {wanted} bytes: {used} of store.capacity_bytes {self._capacity} are "
                        f"taken in {self.folder}"
                    )
            for partial, size in sizes.items():
                with open(partial, "xb") as file:
                    file.truncate(size)

    def _used_bytes(self, replaced: Collection[str]) -> int:
        """Bytes of all files but those of the names `replaced`."""
        used = 0
        for entry in os.scandir(self.folder):
            if entry.name not in replaced:
                try:
                    used += entry.stat().st_size
                except FileNotFoundError:  # renamed or removed since it was listed
                    continue
        return used


def _name(key: str) -> str:
    """File name of a key."""
    return quote(key, safe="")


@contextmanager
def _errors_named(doing: str) -> Generator[None]:
    """Turn errors of the system into the store's."""
    try:
        yield
    except OSError as error:
        kind = StoreFull if error.errno in _FULL else StoreError
        raise kind(f"{doing}: {error}") from error


def _write(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _read(descriptor: int, view: memoryview) -> int:
    """Fill `view`; returns the bytes that the file had."""
    done = 0
    while done < len(view) and (count := os.readv(descriptor, [view[done:]])):
        done += count
    return done
