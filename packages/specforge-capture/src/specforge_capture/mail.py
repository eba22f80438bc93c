"""Messages between rank 0 and the other ranks, through the key-value store of their process group.

Polled, never waited in: a client of that store runs one operation at a time, and the process group needs it
too.
"""

import json
import threading
from typing import Any

import torch.distributed as dist

_PREFIX = "specforge/features"
_ERROR = "error"


class StreamFailed(RuntimeError):
    """There will be no more features; the message is that of whoever failed."""


class Mailbox:
    """Messages from one process to another, in order; each is read once.

    Args:
        store: a key-value store that both reach.
        name: the same on both sides.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = dist.PrefixStore(_PREFIX, store), name
        self._sent = self._read = 0
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Leave a message; may be called from any thread."""
        with self._lock:
            self._store.set(f"{self._name}/{self._sent}", json.dumps(message))
            self._sent += 1

    def receive(self) -> dict[str, Any] | None:
        """The next message, None if there is none yet.

        Raises:
            StreamFailed: if a failure was announced, whatever was sent before it.
        """
        if self._store.check([_ERROR]):
            raise StreamFailed(self._store.get(_ERROR).decode())
        key = f"{self._name}/{self._read}"
        if not self._store.check([key]):
            return None
        message = json.loads(self._store.get(key))
        self._store.delete_key(key)
        self._read += 1
        return message


def announce_failure(store: dist.Store, message: str) -> None:
    """Have every reader of every mailbox raise."""
    dist.PrefixStore(_PREFIX, store).set(_ERROR, message)
