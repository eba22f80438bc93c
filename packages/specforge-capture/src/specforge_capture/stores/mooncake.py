"""The Mooncake store: memory of the capture servers' hosts, read over TCP or RDMA without a copy.

Invariants:
- Every object is pinned hard: Mooncake evicts unpinned objects under pressure, read or not. So a full store
  refuses new objects until acknowledged ones are removed.
- Objects are upserted: a plain put on an existing key reports success and keeps the old bytes.
- No call enters Mooncake once `close` began; one that did would crash the process.

`close` takes 3 s. Against a dead master a call fails at once or after 4 s and `close` returns after 14 s;
`setup` would fail only after 91 s, hence the look at its port first.
"""

import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from torch import Tensor

from specforge_capture.stores.base import MissingObject, ShortObject, StoreError, StoreFull
from specforge_capture.stores.master import NOT_INSTALLED
from specforge_capture.stores.memory import host_bytes
from specforge_config.base import host_and_port
from specforge_config.store import MooncakeStore

_OK, _NO_SPACE, _MISSING, _LOST = 0, -200, -704, -800
_MEANINGS = {
    -200: "there is no room",
    -600: "an argument is wrong, such as a buffer that is too small or not registered",
    -703: "the object is being written",
    -704: "there is no such object",
    -706: "the object is being read",
    -800: "the transfer failed: the process that holds the object is gone, or it took longer than "
    "store.transfer_timeout_seconds",
    -900: "the master cannot be reached",
}
# Room appears behind a refused put where Mooncake evicts objects of others, or one was removed just now.
_FULL_SECONDS, _FULL_POLL_SECONDS = 0.5, 0.005
_PROBE_SECONDS = 5.0
_LIBRARIES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1"}


class Mooncake:
    """A feature store in Mooncake; see `FeatureStore`.

    Args:
        config: the settings.
        contribute: hand `capacity_bytes` of this process's memory to the store.

    Raises:
        StoreError: if the master does not answer, or the client cannot be set up.
        ValueError: if Mooncake, or a library that it needs, is not installed.
    """

    def __init__(self, config: MooncakeStore, *, contribute: bool) -> None:
        library = load_library()
        self._master = config.master
        _probe(config.master)
        # Mooncake reads them when a client is set up, and has no arguments for them.
        os.environ["MC_TCP_BIND_ADDRESS"] = config.local_hostname
        os.environ["MC_TRANSFER_TIMEOUT"] = str(max(1, round(config.transfer_timeout_seconds)))
        os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
        self._calls = _Calls(f"the store at {config.master} is closed")
        self._store = library.MooncakeDistributedStore()
        # Zero-copy calls alone are used, so the client needs no buffer of its own.
        segment, buffer = config.capacity_bytes if contribute else 0, 0
        code = self._store.setup(
            config.local_hostname,
            "P2PHANDSHAKE",
            segment,
            buffer,
            config.protocol,
            config.devices,
            config.master,
        )
        if code != _OK:
            raise StoreError(
                f"a Mooncake client with store.local_hostname {config.local_hostname}, store.protocol "
                f"{config.protocol} and {segment} bytes could not be set up: {_meaning(code)}"
            )
        self._pinned = library.ReplicateConfig()
        self._pinned.replica_num = 1
        self._pinned.with_hard_pin = True
        if contribute:  # a copy inside this process, unless its own segment is full
            self._pinned.preferred_segment = self._store.get_hostname()

    def put(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """See `FeatureStore`."""
        waiting = {key: host_bytes(tensor) for key, tensor in objects}
        deadline = time.monotonic() + _FULL_SECONDS
        while waiting:
            with self._calls.one():
                codes = self._store.batch_upsert_from(
                    list(waiting), *_pointers(waiting.values()), self._pinned
                )
            failed = {key: code for key, code in zip(waiting, codes, strict=True) if code != _OK}
            if any(code != _NO_SPACE for code in failed.values()):
                raise self._error("put", failed)
            if failed and time.monotonic() > deadline:
                wanted = sum(waiting[key].numel() for key in failed)
                raise StoreFull(
                    f"no room for {wanted} bytes ({next(iter(failed))!r} and {len(failed) - 1} more) in the "
                    f"store at {self._master}: remove objects, or raise store.capacity_bytes"
                )
            waiting = {key: waiting[key] for key in failed}
            if waiting:
                time.sleep(_FULL_POLL_SECONDS)

    def get_into(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """See `FeatureStore`."""
        buffers = [(key, host_bytes(tensor)) for key, tensor in objects]
        if not buffers:
            return
        keys, views = zip(*buffers, strict=True)
        with self._calls.one():
            found = self._store.batch_get_into(list(keys), *_pointers(views))
            for (key, view), count in zip(buffers, found, strict=True):
                if count == view.numel():
                    continue
                size = count if count >= 0 else self._store.get_size(key)
                if 0 <= size != view.numel():
                    raise ShortObject(f"object {key!r} has {size} bytes; required: {view.numel()}")
                raise self._error("get", {key: count})

    def remove(self, keys: Sequence[str]) -> None:
        """See `FeatureStore`."""
        if not keys:
            return
        with self._calls.one():
            # By force: a reader's lease would keep an object that was read just now.
            codes = self._store.batch_remove(list(keys), True)
        failed = {k: c for k, c in zip(keys, codes, strict=True) if c not in (_OK, _MISSING)}
        if failed:
            raise self._error("remove", failed)

    def remove_prefix(self, prefix: str) -> int:
        """See `FeatureStore`."""
        with self._calls.one():
            count = self._store.remove_by_regex(f"^{_escaped(prefix)}", True)
        if count < 0:
            raise self._error("remove all of", {prefix: count})
        return count

    def register(self, buffer: Tensor) -> None:
        """See `FeatureStore`."""
        view = host_bytes(buffer)
        with self._calls.one():
            code = self._store.register_buffer(view.data_ptr(), view.numel())
        if code != _OK:
            raise StoreError(f"registering {view.numel()} bytes: {_meaning(code)}")

    def unregister(self, buffer: Tensor) -> None:
        """See `FeatureStore`."""
        with self._calls.one():
            code = self._store.unregister_buffer(buffer.data_ptr())
        if code != _OK:
            raise StoreError(f"unregistering a buffer: {_meaning(code)}; required: one that was registered")

    def close(self) -> None:
        """See `FeatureStore`. Waits for calls that are under way, which the timeouts bound."""
        if self._calls.end():
            self._store.close()

    def _error(self, verb: str, codes: dict[str, int]) -> StoreError:
        """The error for failed keys; the first decides its kind."""
        key, code = next(iter(codes.items()))
        kind = MissingObject if code in (_MISSING, _LOST) and verb == "get" else StoreError
        more = f" (and {len(codes) - 1} more)" if len(codes) > 1 else ""
        return kind(f"cannot {verb} {key!r}{more} in the store at {self._master}: {_meaning(code)}")


class _Calls:
    """Counts the calls inside of a client, so that it ends between them."""

    def __init__(self, closed: str) -> None:
        self._closed_message = closed
        self._state = threading.Condition()
        self._running = 0
        self._open = True

    @contextmanager
    def one(self) -> Generator[None]:
        """One call; an error once `end` was called."""
        with self._state:
            if not self._open:
                raise StoreError(self._closed_message)
            self._running += 1
        try:
            yield
        finally:
            with self._state:
                self._running -= 1
                self._state.notify_all()

    def end(self) -> bool:
        """Let no more calls in and wait for those inside. True the first time."""
        with self._state:
            first, self._open = self._open, False
            self._state.wait_for(lambda: self._running == 0)
        return first


def load_library() -> Any:
    """The module `mooncake.store`.

    Raises:
        ValueError: naming the package that is missing, Python's or Debian's.
    """
    try:
        return import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ValueError(NOT_INSTALLED) from error
    except ImportError as error:
        package = next((name for part, name in _LIBRARIES.items() if part in str(error)), None)
        advice = f"; on Debian and Ubuntu: apt-get install {package}" if package else ""
        raise ValueError(f"store.kind mooncake: Mooncake cannot be loaded: {error}{advice}") from error


def _probe(master: str) -> None:
    try:
        socket.create_connection(host_and_port(master), timeout=_PROBE_SECONDS).close()
    except OSError as error:
        raise StoreError(
            f"no Mooncake master answers at store.master {master}: {error}; start one, or name another"
        ) from error


def _pointers(views: Any) -> tuple[list[int], list[int]]:
    """Addresses and lengths of byte tensors."""
    return [view.data_ptr() for view in views], [view.numel() for view in views]


def _escaped(text: str) -> str:
    """`text` as a regular expression of C++'s dialect, which refuses escapes of ordinary characters."""
    return "".join(f"\\{char}" if char in "^$\\.*+?()[]{}|" else char for char in text)


def _meaning(code: int) -> str:
    return f"{_MEANINGS.get(code, 'Mooncake does not say why')} (code {code})"
