"""What a run leaves beside its checkpoints: rows of metrics, the audit of samples, progress events, and its
totals.

Every rank keeps the totals; rank 0 alone writes `metrics.jsonl` and reports. Each rank writes its own
`samples.rank<r>.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specforge_config.run import RunConfig
from specforge_train.checkpoint import Checkpoints
from specforge_train.decode import DecodeCounts
from specforge_train.metrics import JsonLines, Pair, Window, ratios
from specforge_train.parallel import World
from specforge_train.timing import Clock, Lap, peak_flops, peak_memory, performance

TOTALS = ("wall", "capture", "train", "timed", "samples", "dropped", "skipped")
"""`timed` are the samples that the seconds `wall`, `capture` and `train` of all ranks were spent on."""
Report = Callable[[dict[str, Any]], None]


class StreamStats(Protocol):
    """What a stream did since it was last asked."""

    @property
    def capture_seconds(self) -> float:
        """Time that the target worked; may wait until it is done."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens that it read."""
        ...

    @property
    def staged_bytes(self) -> int:
        """Bytes of states of the largest staged batch."""
        ...


@dataclass(frozen=True)
class Measured:
    """What this rank measured of a window of steps, which may still be running on the device."""

    lap: Lap
    stream: StreamStats
    memory: Mapping[str, float]
    """Bytes of `peak_memory`."""


class Recorder:
    """Records one start of a run. `close_window` is a collective; the rest is each rank's own."""

    def __init__(
        self, config: RunConfig, world: World, checkpoints: Checkpoints, report: Report | None
    ) -> None:
        """Continue the run's files after the step of its checkpoint.

        Args:
            config: the run.
            world: the ranks.
            checkpoints: where the run's folder is and at which step it stands.
            report: takes progress events.
        """
        folder, step = checkpoints.folder, checkpoints.step
        folder.mkdir(parents=True, exist_ok=True)
        self.clock = Clock(world.device)
        self.last: dict[str, Any] = {}
        """The last row of training metrics."""
        self.spent = dict.fromkeys(TOTALS, 0.0) | checkpoints.totals
        """Totals over closed windows, ranks and starts of the run; seconds, samples, steps."""
        self._warm_up: dict[str, float] = {}
        self._world, self._report, self._tp_size = world, report, config.topology.tp_size
        self._window, self._facts = Window(), {}
        self._note = {"dummy_weights": True} if config.dummy_weights else {}
        self._metrics = JsonLines(folder / "metrics.jsonl", step) if world.main else None
        self._samples = (
            JsonLines(folder / f"samples.rank{world.rank}.jsonl", step) if config.tracking.samples else None
        )

    def add_samples(self, step: int, samples: Sequence[tuple[tuple[int, int], str]]) -> None:
        """Write which ((epoch, position), sample id) this rank trained on in a step."""
        if self._samples:
            rows = [[*position, name] for position, name in samples]
            self._samples.add({"step": step, "samples": rows})

    def add_step(
        self, facts: dict[str, Any], head: Mapping[str, float], metrics: Mapping[str, Pair], total_steps: int
    ) -> None:
        """Add one step's sums over the world to the window, and tell that it is done.

        Args:
            facts: what the row says of its last step: step, epoch, first, count, lr, grad_norm.
            head: `HOST_SUMS`.
            metrics: metric -> (numerator, denominator).
            total_steps: optimizer steps of the run.
        """
        self._facts = facts
        self._window.add(head, metrics)
        shown = {name: value for name, value in ratios(metrics).items() if name in ("loss", "tau_estimate")}
        rate = {"samples_per_s": self.last["perf/samples_per_s"]} if self.last else {}
        self.tell("train", facts["step"], total=total_steps, **shown, **rate)

    def measure(self, stream: StreamStats) -> Measured:
        """End the window behind the step that was queued last, and open the next one. Waits for nothing."""
        return Measured(self.clock.lap(), stream, peak_memory(self._world.device))

    def close_window(self, measured: Measured) -> None:
        """Write a row over the steps that were added since the last one, which are those of `measured`."""
        window, self._window = self._window, Window()
        times, stream = measured.lap.read(), measured.stream
        mine = {
            "wall": times.wall,
            "capture": times.capture,
            "train": times.train,
            "capture_seconds": stream.capture_seconds,
            # Each rank of an island counts the tokens of all of it.
            "captured_tokens": stream.tokens / self._tp_size,
            "staged_bytes": float(stream.staged_bytes),
            **measured.memory,
        }
        ranks = self._world.gather(mine)
        samples = window.sums["samples"]
        timed = {name: sum(rank[name] for rank in ranks) for name in ("wall", "capture", "train")}
        timed["timed"] = samples
        counts = {"samples": samples, "dropped": window.sums["dropped"], "skipped": window.skipped}
        # Kernels are compiled in the first window of a start: its times count only until there is another.
        for name, value in (counts | timed).items():
            self.spent[name] += value - self._warm_up.get(name, 0.0)
        self._warm_up = {} if self.last else timed
        self.last = {
            **self._facts,
            **window.ratios(),
            "dropped": int(window.sums["dropped"]),
            "skipped": window.skipped,
            **performance(ranks, window.steps, window.sums, peak_flops(self._world.device)),
        }
        self._add_row(self.last)

    def add_evaluation(self, step: int, counts: DecodeCounts) -> None:
        """Write a row of an evaluation over the world."""
        row = {"eval/tau": counts.tau} | {f"eval/accept/{k}": a for k, a in enumerate(counts.accept_by_slot)}
        row = {name: value for name, value in row.items() if math.isfinite(value)}
        lossless = {"eval/lossless_identical": counts.identical, "eval/lossless_total": counts.total}
        self._add_row({"step": step, **row, **lossless})
        self.tell("evaluate", step, tau=row.get("eval/tau"))

    def tell(self, stage: str, step: int, **values: Any) -> None:
        """Report a progress event, on rank 0."""
        if self._report and self._world.main:
            self._report({"stage": stage, "step": step, **values})

    def sync(self) -> None:
        """Wait until all rows are on the disk: before a checkpoint that stands for them."""
        for file in (self._metrics, self._samples):
            if file:
                file.sync()

    def close(self) -> None:
        """Close the files."""
        for file in (self._metrics, self._samples):
            if file:
                file.close()

    def _add_row(self, row: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.add({**row, **self._note})
