"""The local store: features that a rank captured and has not trained on yet, in its own memory.

Invariant: at most one batch is staged. Capture runs when the trainer asks, so its states never pile up.
"""

from specforge_config.features import FeatureBatch


class LocalStore:
    """Room for one staged batch, and an account of the bytes that passed through."""

    def __init__(self) -> None:
        self._staged: FeatureBatch | None = None
        self.staged_bytes = 0
        """Bytes of the largest batch staged since the last `reset`."""

    def put(self, batch: FeatureBatch) -> None:
        """Stage a batch.

        Raises:
            RuntimeError: if the batch before it was not taken.
        """
        if self._staged is not None:
            raise RuntimeError(f"{list(self._staged.sample_ids)} are still staged")
        self._staged = batch
        self.staged_bytes = max(self.staged_bytes, batch.state_bytes)

    def take(self) -> FeatureBatch:
        """Hand out the staged batch and forget it.

        Raises:
            RuntimeError: if nothing is staged.
        """
        if self._staged is None:
            raise RuntimeError("nothing is staged")
        batch, self._staged = self._staged, None
        return batch

    def reset(self) -> None:
        """Start a new account."""
        self.staged_bytes = 0
