"""Where a step's time goes: capture, training, and the bubble between them.

On a GPU, marks are CUDA events on the current stream, read once the device has passed them: measuring adds no
synchronisation. On a CPU they are readings of the clock.

    bubble = wall - capture - train
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 operations a second, from the vendor's data sheets; keys are parts of the device's name."""

Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class Times:
    """Seconds of one window on this rank."""

    wall: float
    capture: float
    train: float


@dataclass(frozen=True)
class Lap:
    """The marks of one window, which the device may still have ahead of it."""

    start: Mark
    end: Mark
    spans: Mapping[str, Sequence[tuple[Mark, Mark]]]

    def read(self) -> Times:
        """Sum up the window. Waits until the device has passed its end."""
        if isinstance(self.end, torch.cuda.Event):
            self.end.synchronize()
        totals = {kind: sum(_seconds(a, b) for a, b in spans) for kind, spans in self.spans.items()}
        return Times(wall=_seconds(self.start, self.end), **totals)


class Clock:
    """Collects the spans of a window; `lap` closes it and opens the next one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        """Open a window here, without what was measured since the last one."""
        self._open(self._mark())

    @contextmanager
    def span(self, kind: str) -> Generator[None]:
        """Count the body as `capture` or `train`."""
        start = self._mark()
        yield
        self._spans[kind].append((start, self._mark()))

    def lap(self) -> Lap:
        """Close the window here and open the next one. Does not wait for the device."""
        lap = Lap(self._start, self._mark(), self._spans)
        self._open(lap.end)
        return lap

    def _open(self, start: Mark) -> None:
        self._start = start
        self._spans: dict[str, list[tuple[Mark, Mark]]] = {"capture": [], "train": []}

    def _mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000
    assert not isinstance(start, torch.cuda.Event)
    assert not isinstance(end, torch.cuda.Event)
    return end - start


def performance(
    ranks: Sequence[Mapping[str, float]], steps: int, sums: Mapping[str, float], peak: float | None
) -> dict[str, float | list[float]]:
    """The `perf/` metrics of a window.

    Args:
        ranks: of each rank: seconds `wall`, `capture`, `train` and `capture_seconds`, `captured_tokens`,
            `staged_bytes`, and the bytes of `peak_memory`.
        steps: optimizer steps of the window.
        sums: `samples`, `tokens` and `flops` of the window over the world.
        peak: operations a second of one device, None where unknown.

    Returns:
        Rates over the world; shares of the ranks' total time, and of each rank; the largest rank's bytes.
    """
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    seconds = total["wall"] / len(ranks)
    share = {kind: total[kind] / total["wall"] for kind in ("capture", "train")}
    row: dict[str, float | list[float]] = {
        "perf/step_seconds": seconds / steps,
        "perf/samples_per_s": sums["samples"] / seconds,
        "perf/tokens_per_s": sums["tokens"] / seconds,
        "perf/capture_share": share["capture"],
        "perf/train_share": share["train"],
        "perf/bubble_fraction": max(0.0, 1.0 - share["capture"] - share["train"]),
    }
    if total["capture_seconds"]:
        row["perf/captured_tokens_per_s"] = total["captured_tokens"] / (total["capture_seconds"] / len(ranks))
    if sums["flops"] and peak:
        row["perf/mfu"] = sums["flops"] / (total["wall"] * peak)
    for name in ranks[0]:
        if name == "staged_bytes" or name.startswith("peak_"):
            row[f"perf/{name}"] = max(rank[name] for rank in ranks)
    if len(ranks) > 1:
        for kind in ("capture", "train"):
            row[f"perf/{kind}_share_by_rank"] = [rank[kind] / rank["wall"] for rank in ranks]
    return row


def peak_memory(device: torch.device) -> dict[str, float]:
    """Bytes: `peak_allocated` and `peak_reserved` of a GPU's allocator; `peak_resident` of the process on a
    CPU.
    """
    if device.type == "cuda":
        return {
            "peak_allocated": float(torch.cuda.max_memory_allocated(device)),
            "peak_reserved": float(torch.cuda.max_memory_reserved(device)),
        }
    return {"peak_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def peak_flops(device: torch.device) -> float | None:
    """Dense bfloat16 operations a second of the device; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
