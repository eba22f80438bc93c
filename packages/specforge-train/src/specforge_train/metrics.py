"""Training metrics as ratios of sums over the world, and the files they are written to.

Invariant: a metric travels as (numerator, denominator). Both are summed over micro-steps on the device, over
ranks in one all-reduce an optimizer step, and over the steps of a window on the host; the ratio is formed
last. So one rank with four samples and two ranks with two report the same, and a share never exceeds one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_train.parallel import World

HOST_SUMS = ("weights", "samples", "tokens", "dropped", "flops", "stop")
"""Sums that a rank knows without its device; `squared` and the metrics follow them in a step's vector."""

Pair = tuple[float, float]


class StepSums:
    """Sums of one optimizer step: added up on this rank, then over the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._host = dict.fromkeys(HOST_SUMS, 0.0)
        self._metrics: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, tuple[Tensor, Tensor]], **host: float) -> None:
        """Add a micro-step: metric -> ([], []) on the device, and values of `HOST_SUMS`."""
        for name, pair in metrics.items():
            value = torch.stack([part.detach().double() for part in pair])
            self._metrics[name] = self._metrics[name] + value if name in self._metrics else value
        for name, value in host.items():
            self._host[name] += value

    def reduce(self, squared: Tensor) -> StepTotals:
        """Sum over the world in one all-reduce. `squared` [] float64 is this rank's part of |g|²."""
        device = self._world.device
        host = torch.tensor([self._host[name] for name in HOST_SUMS], dtype=torch.float64)
        if device.type == "cuda":
            host = host.pin_memory().to(device, non_blocking=True)
        vector = torch.cat([host, squared.view(1), *self._metrics.values()])
        return StepTotals(self._world.sum_(vector), tuple(self._metrics))


class StepTotals:
    """A step's sums over the world, on the device, with a copy on its way to the host."""

    def __init__(self, vector: Tensor, names: tuple[str, ...]) -> None:
        self._names = names
        self._event = None
        self.weights: Tensor = vector[HOST_SUMS.index("weights")]
        """[] float64, device: the loss denominator W."""
        self.squared: Tensor = vector[len(HOST_SUMS)]
        """[] float64, device: |g|²."""
        if vector.is_cuda:
            self._copy = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self._copy.copy_(vector, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._copy = vector

    def read(self) -> tuple[dict[str, float], dict[str, Pair]]:
        """(host sums and `norm` of the normalised gradient, metric -> sums); waits until the step is done on
        the device.
        """
        if self._event is not None:
            self._event.synchronize()
        values = self._copy.tolist()
        head = dict(zip((*HOST_SUMS, "squared"), values, strict=False))
        squared, weights = head.pop("squared"), head["weights"]
        head["norm"] = math.sqrt(squared) / weights if weights else 0.0
        flat = iter(values[len(HOST_SUMS) + 1 :])
        return head, dict(zip(self._names, zip(flat, flat, strict=True), strict=True))


class Window:
    """Totals of the steps since the last row of metrics."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        """Steps whose loss weights sum to 0: nothing was learnt in them."""
        self.sums = dict.fromkeys(HOST_SUMS, 0.0)
        self._metrics: dict[str, Pair] = {}

    def add(self, head: Mapping[str, float], metrics: Mapping[str, Pair]) -> None:
        """Add one step's totals."""
        self.steps += 1
        self.skipped += head["weights"] == 0
        for name in HOST_SUMS:
            self.sums[name] += head[name]
        for name, (numerator, denominator) in metrics.items():
            before = self._metrics.get(name, (0.0, 0.0))
            self._metrics[name] = (before[0] + numerator, before[1] + denominator)

    def ratios(self) -> dict[str, float]:
        """Metric -> ratio; 0 where nothing counted."""
        return ratios(self._metrics)


def ratios(metrics: Mapping[str, Pair]) -> dict[str, float]:
    """Metric -> numerator over denominator; 0 where nothing counted."""
    return {
        name: numerator / denominator if denominator else 0.0
        for name, (numerator, denominator) in metrics.items()
    }


class JsonLines:
    """A file of JSON objects, one a line, each with its optimizer `step`; lines appear whole as soon as they
    are added.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Continue the file after `step`: lines of later steps, which are done again, and a torn last line
        are removed.
        """
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = (
            [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            if step
            else []
        )
        if kept != lines:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(kept))
            temporary.replace(path)
        self._file = path.open("a")

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk: before a checkpoint that stands for them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
