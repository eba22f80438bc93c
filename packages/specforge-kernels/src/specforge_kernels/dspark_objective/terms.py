"""What the DSpark objective takes and gives, and the host's part of it: which slots count and whose teacher
rows they need.

Loss weights are known on the host before the step, so slots of weight 0 are left out of every product instead
of being multiplied by 0, and each distinct teacher row of a chunk is listed once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..transfer import to_device


@dataclass(frozen=True)
class DSparkLossWeights:
    """Factors of the three losses."""

    ce: float = 0.1
    """Cross-entropy to the data token."""
    l1: float = 0.9
    """L1 distance between the draft's and the target's distributions."""
    confidence: float = 1.0
    """Binary cross-entropy of the confidence head to the acceptance estimate."""


@dataclass(frozen=True)
class DSparkTerms:
    """Sums over the slots, not normalised. fp32, or fp64 for fp64 inputs."""

    loss: Tensor
    """[] differentiable: Σ w (ce·CE + l1·L1 + confidence·BCE)."""
    ce: Tensor
    """[] Σ w CE, detached."""
    l1: Tensor
    """[] Σ w L1, detached."""
    confidence: Tensor
    """[] Σ w BCE, detached; 0 without a confidence head."""
    acceptance: Tensor
    """[M] a = clamp(1 - L1/2, 0, 1), 0 where the weight is 0, detached."""
    correct: Tensor
    """[M] bool: the token the teacher ranks first is also ranked first by the draft; False where the weight
    is 0.
    """


@dataclass(frozen=True)
class SlotChunk:
    """Slots of positive weight, on the device."""

    slots: Tensor
    """[m] int64: their indices among the M."""
    labels: Tensor
    """[m] int64: tokens they predict."""
    weights: Tensor
    """[m] fp32."""
    teacher_rows: Tensor
    """[t] int32: the distinct rows of `last_hidden` that teach them, ascending."""
    teacher_of: Tensor
    """[m] int32: each slot's index into `teacher_rows`."""


def slot_chunks(
    teacher_index: Tensor,
    labels: Tensor,
    weights: Tensor,
    size: int,
    device: torch.device,
    bounds: tuple[int, int],
) -> Iterator[SlotChunk]:
    """Chunks of at most `size` slots each, in slot order; none if every weight is 0.

    Args:
        teacher_index, labels: [M] int64. weights: [M] fp32. On the host; a device tensor is fetched, which
            stops the host.
        size: slots of a chunk.
        device: where the chunks go.
        bounds: rows of `last_hidden` and the vocabulary size.

    Raises:
        ValueError: a slot of positive weight whose teacher row or label is out of bounds, or a negative
        weight.
    """
    teacher, label, weight = (x.detach().cpu().numpy() for x in (teacher_index, labels, weights))
    if (weight < 0).any():
        raise ValueError(f"slot weights must not be negative, found {weight.min()}")
    valid = np.flatnonzero(weight)
    for name, values, bound in (("teacher_index", teacher, bounds[0]), ("labels", label, bounds[1])):
        chosen = values[valid]
        if chosen.size and (chosen.min() < 0 or chosen.max() >= bound):
            raise ValueError(
                f"{name} of weighted slots must be in [0, {bound}), found {chosen.min()} to {chosen.max()}"
            )
    for begin in range(0, valid.size, size):
        slots = valid[begin : begin + size]
        rows, teacher_of = np.unique(teacher[slots], return_inverse=True)
        integers = [x.astype(np.int32) for x in (slots, label[slots], rows, teacher_of)]
        index, label_of, rows, teacher_of, weight_of = to_device(
            [*integers, weight[slots].astype(np.float32)], device
        )
        yield SlotChunk(index.long(), label_of.long(), weight_of, rows, teacher_of)
