"""Times whole DSpark training steps of several contenders, one after the other in one process, on the same
lengths.

A step is forward, backward, gradient clipping and AdamW on one sequence of random features, batch 1, of which
the first 30% are not supervised. The device is synchronised once a step; the phases are read from events in
between.
"""

import gc
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

UNSUPERVISED = 0.3
PACKED = 4
"""Sequences of a packed step."""
TURNS = 3
"""Times that a packed step and its sequences alone are timed, in turns."""


@dataclass(frozen=True)
class StepShapes:
    """Sizes of the target and the draft; Qwen3-8B's by default."""

    hidden: int = 4096
    intermediate: int = 12288
    vocabulary: int = 151936
    heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    captured: tuple[int, ...] = (1, 9, 17, 25, 33)
    """Target layers whose states the draft reads."""
    target_layers: int = 36
    draft_layers: int = 5
    anchors: int = 512
    block: int = 7
    markov_rank: int = 256
    mask_token: int = 151669
    decay: float = 4.0
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True)
class Sample:
    """One sequence, or several packed into a row; tokens and mask on the host and on the device."""

    tokens: Tensor
    """[S] int64, host."""
    offsets: Tensor
    """[B + 1] int64, host: where each sequence starts, and S."""
    loss_mask: Tensor
    """[S] bool, host."""
    device_tokens: Tensor
    """[1, S] int64."""
    device_loss_mask: Tensor
    """[1, S] int64."""
    hidden: Tensor
    """[S, K·H] captured states, bf16."""
    last_hidden: Tensor
    """[S, H] final states, bf16."""


class Contender(Protocol):
    """A trainer's step."""

    parameters: Sequence[Tensor]
    """What it trains."""
    packs: bool
    """Whether a step takes several packed sequences."""

    def forward(self, sample: Sample) -> Tensor:
        """The loss, to be differentiated."""
        ...

    def update(self) -> None:
        """Clip, step, and drop the gradients."""
        ...

    def close(self) -> None:
        """Release what is not memory."""
        ...


Build = Callable[[StepShapes, torch.device], Contender]


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step and of its phases on the device."""

    total: float
    forward: float
    backward: float
    update: float


@dataclass(frozen=True)
class PackedReport:
    """Steps over four packed sequences, timed in turns with steps over each of them alone."""

    samples_per_s: float
    over_single: float
    """Their samples/s over those of the same sequences alone."""
    peak: float
    """GiB allocated at most."""


@dataclass(frozen=True)
class Report:
    """What was measured of one contender."""

    name: str
    parameters: int
    first_pass: float
    """Seconds of the first step of each length, compilation included."""
    samples_per_s: float
    """Over the lengths, afterwards."""
    mean: StepTime
    """Over the lengths."""
    at: dict[int, StepTime]
    """Length -> median of five steps."""
    peak: float
    """GiB allocated at most by steps of one sequence."""
    packed: PackedReport | None
    """None where the trainer cannot pack."""


def draw_lengths(seed: int = 7, count: int = 24, longest: int = 3911) -> list[int]:
    """Log-normal sequence lengths from 43 to 3911 tokens, as in the published colocated run."""
    generator = random.Random(seed)
    return [min(longest, max(43, int(math.exp(generator.gauss(6.5, 0.8))))) for _ in range(count)]


def draw_sample(shapes: StepShapes, lengths: Sequence[int], device: torch.device) -> Sample:
    """Random tokens and features of sequences of these lengths, packed."""
    size = sum(lengths)
    tokens = torch.randint(0, shapes.mask_token, (size,))
    mask = torch.cat([torch.arange(n) >= max(1, int(UNSUPERVISED * n)) for n in lengths])
    width = len(shapes.captured) * shapes.hidden
    return Sample(
        tokens,
        torch.tensor([0, *accumulate(lengths)]),
        mask,
        tokens[None].to(device),
        mask[None].long().to(device),
        torch.randn(size, width, device=device, dtype=torch.bfloat16),
        torch.randn(size, shapes.hidden, device=device, dtype=torch.bfloat16),
    )


def time_step(contender: Contender, sample: Sample, device: torch.device) -> StepTime:
    """One step, from a device at rest to a device at rest."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)] if device.type == "cuda" else []

    def mark(phase: int) -> None:
        if marks:
            marks[phase].record()

    _rest(device)
    start = time.perf_counter()
    mark(0)
    loss = contender.forward(sample)
    mark(1)
    loss.backward()
    mark(2)
    contender.update()
    mark(3)
    _rest(device)
    total = 1e3 * (time.perf_counter() - start)
    phases = [a.elapsed_time(b) for a, b in pairwise(marks)] or [math.nan] * 3
    return StepTime(total, *phases)


def _rest(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_steps(
    name: str,
    build: Build,
    shapes: StepShapes,
    lengths: Sequence[Sequence[int]],
    at: Sequence[int],
    device: torch.device,
) -> list[Report]:
    """A report for each of `lengths`: first pass, two steady passes, five steps at each length of `at` (for
    the first report), packed steps in turns with single ones. Frees the contender.
    """
    torch.manual_seed(0)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    contender = build(shapes, device)
    first, *others = lengths
    reports = [_measure(name, contender, shapes, first, at, device)]
    reports += [_measure(name, contender, shapes, other, (), device) for other in others]
    contender.close()
    del contender
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return reports


def _measure(
    name: str,
    contender: Contender,
    shapes: StepShapes,
    lengths: Sequence[int],
    at: Sequence[int],
    device: torch.device,
) -> Report:
    def step(*sizes: int) -> StepTime:
        return time_step(contender, draw_sample(shapes, sizes, device), device)

    start = time.perf_counter()
    for size in lengths:
        step(size)
    first_pass = time.perf_counter() - start
    steady = [step(size) for _ in range(2) for size in lengths]
    at_lengths = {size: _combine([step(size) for _ in range(6)][1:], median) for size in at}
    peak = _peak(device)
    return Report(
        name,
        sum(p.numel() for p in contender.parameters),
        first_pass,
        1e3 * len(steady) / sum(x.total for x in steady),
        _combine(steady, lambda values: sum(values) / len(values)),
        at_lengths,
        peak,
        _measure_packed(step, lengths, device) if contender.packs else None,
    )


def _measure_packed(
    step: Callable[..., StepTime], lengths: Sequence[int], device: torch.device
) -> PackedReport:
    """Every four lengths alone and then packed, in turns, so that both meet the same clock of the device.

    The medians of `TURNS` turns, after one that is not counted.
    """
    groups = [lengths[i : i + PACKED] for i in range(0, len(lengths) - PACKED + 1, PACKED)]
    turns = [
        [(sum(step(size).total for size in group), step(*group).total) for group in groups]
        for _ in range(1 + TURNS)
    ]
    medians = [
        [median(times) for times in zip(*of_group, strict=True)] for of_group in zip(*turns[1:], strict=True)
    ]
    alone, packed = (sum(times) for times in zip(*medians, strict=True))
    return PackedReport(1e3 * PACKED * len(groups) / packed, alone / packed, _peak(device))


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else math.nan


def _combine(times: Sequence[StepTime], how: Callable[[list[float]], float]) -> StepTime:
    columns = zip(*((x.total, x.forward, x.backward, x.update) for x in times), strict=True)
    return StepTime(*(how(list(column)) for column in columns))


def print_reports(reports: Sequence[Report]) -> None:
    """One row a contender; `ratio` is the first one's samples/s over its own, `over 1` those of its packed
    steps over those of the same sequences alone.
    """
    sizes = list(reports[0].at)
    heads = [
        "",
        "M params",
        "first pass s",
        "samples/s",
        "ratio",
        "ms fwd/bwd/upd",
        *(f"S={s}" for s in sizes),
        "GiB",
        f"{PACKED} packed",
        "over 1",
        "GiB",
    ]
    rows = [heads]
    for report in reports:
        ratio = reports[0].samples_per_s / report.samples_per_s
        rows.append(
            [
                report.name,
                f"{report.parameters / 1e6:.0f}",
                f"{report.first_pass:.1f}",
                f"{report.samples_per_s:.2f}",
                f"{ratio:.2f}",
                _phases(report.mean),
                *(_phases(report.at[size]) for size in sizes),
                f"{report.peak:.1f}",
                *_packed_cells(report.packed),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _packed_cells(packed: PackedReport | None) -> tuple[str, str, str]:
    if packed is None:
        return "-", "-", "-"
    return f"{packed.samples_per_s:.2f}", f"{packed.over_single:.2f}", f"{packed.peak:.1f}"


def _phases(times: StepTime) -> str:
    return "/".join(f"{x:.1f}" for x in (times.forward, times.backward, times.update))
