"""LocalRolloutStream: features for one trainer rank of a colocated run, captured when the trainer asks for
them.

Invariant: one request captures exactly one island batch (`tp_size * batch_size` prompts, the same on every
    rank of the island), of which the rank keeps its own `batch_size` rows. Nothing is captured ahead, and a
    short or partial capture ends the run instead of training on less.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.stores.local import LocalStore
from specforge_capture.targets.base import PromptRow, Target
from specforge_config.features import FeatureBatch


@dataclass(frozen=True)
class StreamStats:
    """What a stream did since it was last asked, though the device may still be at it."""

    read_seconds: Callable[[], float]
    """Reads `capture_seconds`."""
    tokens: int
    """Tokens that the target read for the whole island."""
    staged_bytes: int
    """Most bytes of states that were staged at a time."""

    @property
    def capture_seconds(self) -> float:
        """Time that the target worked, or that the trainer waited for what is captured elsewhere. Waits until
        the last capture is done."""
        return self.read_seconds()


class LocalRolloutStream:
    """Iterates over the feature batches of one rank, one a micro-step.

    Args:
        target: this rank's share of the target.
        prompts: the prompt set.
        plan: the order of prompts.
        island: the island that the rank belongs to.
        rank: the rank inside its island.
        start_step: optimizer step to start at; what lies before it is skipped without being read.

    Raises:
        ValueError: if the plan is not over `prompts`.
    """

    def __init__(
        self,
        target: Target,
        prompts: PromptSet,
        plan: PromptPlan,
        *,
        island: int = 0,
        rank: int = 0,
        start_step: int = 0,
    ) -> None:
        if (plan.num_rows, plan.fingerprint) != (len(prompts), prompts.fingerprint):
            raise ValueError(f"the plan is over {plan.num_rows} other prompts than the {len(prompts)} given")
        self._target = target
        self._prompts = prompts
        self._own = slice(rank * plan.batch_size, (rank + 1) * plan.batch_size)
        self._tasks = plan.island_batches(island, start_step)
        self._store = LocalStore()
        self._clock = _CaptureClock()
        self._tokens = 0

    def __iter__(self) -> Iterator[FeatureBatch]:
        return self

    def __next__(self) -> FeatureBatch:
        """Capture and hand out the next batch.

        Raises:
            StopIteration: at the end of the plan.
            ValueError: if the target returned other rows than it was asked for, naming their prompts.
        """
        tasks = next(self._tasks)
        rows = [self._prompts.row(task.row, (task.epoch, task.position)) for task in tasks]
        with self._clock:
            batch = self._target.capture(rows, self._own)
        _require_whole(batch, rows[self._own], self._target)
        self._tokens += sum(len(row.input_ids) for row in rows)
        self._store.put(batch)
        del batch
        return self._store.take()

    def acknowledge(self, step: int) -> None:
        """Nothing: a rank frees its features itself."""

    def stats(self) -> StreamStats:
        """What happened since the last call. Does not wait for a capture that runs."""
        stats = StreamStats(self._clock.seconds, self._tokens, self._store.staged_bytes)
        self._clock, self._tokens = _CaptureClock(), 0
        self._store.reset()
        return stats


def _require_whole(batch: FeatureBatch, rows: list[PromptRow], target: Target) -> None:
    """Check that a capture holds exactly the rows that were asked for, under the right contract."""
    asked = [(row.sample_id, row.position, len(row.input_ids)) for row in rows]
    lengths = batch.cu_seqlens.diff().tolist()
    found = list(zip(batch.sample_ids, batch.positions, lengths, strict=True))
    if found != asked:
        short = [f"{name} ({length} tokens)" for name, _, length in asked]
        raise ValueError(
            f"partial capture: asked for {', '.join(short)}; received "
            f"{', '.join(f'{name} ({length} tokens)' for name, _, length in found) or 'nothing'}"
        )
    target.spec.require_equal(batch.spec, here="the run", there="the captured batch")


class _CaptureClock:
    """Time inside its `with` blocks; on a GPU by events, as a capture is only queued when it returns."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._began: tuple[float, torch.cuda.Event | None] = (0.0, None)

    def __enter__(self) -> None:
        self._began = time.perf_counter(), _event()

    def __exit__(self, *_: object) -> None:
        (began, start), end = self._began, _event()
        if start is None or end is None:
            self._seconds += time.perf_counter() - began
        else:
            self._events.append((start, end))

    def seconds(self) -> float:
        """Seconds in all; waits for the last block's end."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._seconds + sum(start.elapsed_time(end) for start, end in self._events) / 1000


def _event() -> torch.cuda.Event | None:
    """An event recorded now; None in a process that uses no GPU."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
