"""How features are captured ahead of the trainer, and how its ranks fetch them: requests, retries, marks and
waits.

Marks bound what is *held*: samples that are asked for or captured and that the trainer has not acknowledged.
The producer pauses when the next sample would pass a high mark and goes on at the low marks. The samples of
the window that the trainer takes next never wait for the low marks, so that a pause cannot starve it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from specforge_config.base import Config


@dataclass(frozen=True)
class Watermarks:
    """Marks of a run, in samples and bytes."""

    high_samples: int
    low_samples: int
    high_bytes: int | None
    low_bytes: int | None


class ProducerConfig(Config):
    """The process that has prompts captured, in the plan's order."""

    in_flight: PositiveInt = 4
    """Requests that each server works on at a time."""
    retries: NonNegativeInt = 4
    """How often one sample is asked for again after every server that can be used has failed it, whatever
    failed; then the run ends, naming it."""
    backoff_seconds: PositiveFloat = 0.5
    """Wait before a sample or a server is tried again; it doubles with each failure, up to half a minute."""
    request_timeout_seconds: PositiveFloat = 600.0
    """How long a server may take for one sample."""
    outage_seconds: PositiveFloat = 600.0
    """How long all servers may be down at once before the run ends."""
    trainer_seconds: PositiveFloat = 600.0
    """How long the producer waits for a trainer, at its start and after one went away."""
    drain_seconds: PositiveFloat = 60.0
    """How long a stop may take in all, from its request or, without one, from the trainer's end: half of it
    at most for requests in flight, the rest for the trainer with what was captured and for requests that are
    in flight even then. Freeing what is left in the store comes after that."""
    high_samples: PositiveInt | None = None
    """Most samples held; default: four optimizer windows."""
    low_samples: PositiveInt | None = None
    """Samples held at which a pause ends, at least one optimizer window; default: half of `high_samples`."""
    high_bytes: PositiveInt | None = None
    """Most bytes of features held, at least one optimizer window; default: no limit."""
    low_bytes: PositiveInt | None = None
    """Bytes held at which a pause ends; default: half of `high_bytes`."""

    def watermarks(self, window: int, window_bytes: int | None = None) -> Watermarks:
        """The marks for optimizer windows of a size.

        Args:
            window: samples of an optimizer step.
            window_bytes: bytes of the largest window's features; None where they are not known yet.

        Raises:
            ValueError: if a window does not fit between the marks; a line for each fault.
        """
        high = self.high_samples or max(4 * window, self.low_samples or 0)
        low = self.low_samples or max(window, high // 2)
        faults = []
        if low < window:
            faults.append(
                f"deployment.producer.low_samples is {low}; required: at least one optimizer window, "
                f"{window} samples, or the trainer waits for samples that the producer does not ask for"
            )
        if high < low:
            faults.append(
                f"deployment.producer.high_samples is {high}; required: at least low_samples and one "
                f"optimizer window, {low}"
            )
        if window_bytes and self.high_bytes and self.high_bytes < window_bytes:
            faults.append(
                f"deployment.producer.high_bytes is {self.high_bytes}; required: at least the largest "
                f"optimizer window, {window_bytes} bytes"
            )
        if faults:
            raise ValueError("\n".join(faults))
        low_bytes = self.low_bytes or (self.high_bytes and self.high_bytes // 2)
        return Watermarks(high, low, self.high_bytes, low_bytes)

    def _faults(self) -> Iterator[str]:
        for name in ("samples", "bytes"):
            high, low = getattr(self, f"high_{name}"), getattr(self, f"low_{name}")
            if high is not None and low is not None and high < low:
                yield f"high_{name} is {high}, low_{name} is {low}; required: high_{name} of at least as much"
        if self.low_bytes and not self.high_bytes:
            yield "low_bytes is set without high_bytes; required: both, or neither"


class ConsumerConfig(Config):
    """How a trainer rank fetches its features."""

    ahead_batches: PositiveInt = 2
    """Batches that a rank fetches ahead of the one it trains on; they lie on its device."""
    ahead_bytes: PositiveInt | None = None
    """Bytes of states of those batches, beyond which only one is fetched ahead; default: no limit."""
    buffer_bytes: PositiveInt = 256 << 20
    """Pinned host memory through which a rank's features pass."""
    wait_seconds: PositiveFloat = 1800.0
    """How long a rank waits for its next features before the run ends."""
    producer_seconds: PositiveFloat = 60.0
    """How long the trainer goes on while no producer is running."""
