"""What a feature store offers to capture servers, which put, and to trainer ranks, which get.

Invariant: what was put stays, whole, until it is removed; no store makes room for new objects by dropping
older ones. So a producer may count on every object whose ref it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from specforge_config.store import FileStore, MooncakeStore


class StoreError(RuntimeError):
    """A store did not do what it was asked for; the message names the key."""


class StoreFull(StoreError):
    """There is no room for an object, and nothing may be dropped for it."""


class MissingObject(StoreError):
    """An object is not there: never put, removed, or lost with the process that held it."""


class ShortObject(StoreError):
    """An object has another length than was asked for."""


class CorruptObject(StoreError):
    """An object has other bytes than were put."""


class FeatureStore(Protocol):
    """Objects of bytes under string keys. Every method may be called from any thread.

    Tensors are contiguous and lie on the host; an object is the bytes of one.
    """

    def put(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """Store (key, tensor) pairs, all in one go; what was under a key before is replaced.

        On return each object is whole and readable by every client, and pinned until it is removed.

        Raises:
            StoreFull: if they do not all fit. Some of them may then be stored.
            StoreError: if the store failed otherwise.
        """
        ...

    def get_into(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        """Fill each tensor with the object of its key.

        Raises:
            MissingObject: if there is none.
            ShortObject: if it has another length than the tensor.
            StoreError: if the store failed otherwise. The tensors' contents are then undefined.
        """
        ...

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects and free their room; keys without an object are fine."""
        ...

    def remove_prefix(self, prefix: str) -> int:
        """Remove the objects whose keys begin with `prefix`. Returns how many there were."""
        ...

    def register(self, buffer: Tensor) -> None:
        """Let `put` and `get_into` use the memory of `buffer`, and of views of it, without a copy."""
        ...

    def unregister(self, buffer: Tensor) -> None:
        """Take back `register`, before the memory is freed."""
        ...

    def close(self) -> None:
        """Leave the store. What this process contributed to it is lost; any later call is an error."""
        ...


def open_store(config: MooncakeStore | FileStore, *, contribute: bool) -> FeatureStore:
    """Connect this process to a store.

    Args:
        config: which store.
        contribute: hand `capacity_bytes` of this process's memory to it, as capture servers do.

    Raises:
        StoreError: if it cannot be reached.
        ValueError: if the machine lacks what the store needs.
    """
    if config.kind == "files":
        from specforge_capture.stores.files import Files

        return Files(config)
    from specforge_capture.stores.mooncake import Mooncake

    return Mooncake(config, contribute=contribute)
