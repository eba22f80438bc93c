"""What DSpark derives from a batch's tokens alone, on the host: anchors, labels, weights, teacher rows.

- Anchors of a document of S tokens: positions p <= S-2 with tokens p and p+1 supervised; up to `num_anchors`,
  uniform without replacement, sorted.
- Slot k of a block predicts token p+1+k and is taught by the target's state at p+k. It counts while every
  label up to it lies in the document and is supervised, with weight exp(-k / decay).

A batch without any anchor becomes one block at position 0 with all weights 0: the loss is exactly 0 and every
parameter has a zero gradient, so that ranks stay in step. Source: DSpark (arXiv 2607.05147).

Notation: T packed tokens, B documents, N anchors, G block, M = N·G slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specforge_config.draft import DSparkConfig
from specforge_config.features import FeatureBatch
from specforge_kernels.anchored_attention.api import AnchoredLayout, build_layout
from specforge_kernels.transfer import to_device
from specforge_train.methods.base import DraftShape, StepInputs


@dataclass(frozen=True)
class DSparkInputs(StepInputs):
    """A step's inputs. The objective's three stay on the host, the rest moves with `to`."""

    block: int
    """G."""
    window: int | None
    """Sliding window."""
    cu_seqlens: Tensor
    """[B + 1] int64, host."""
    anchors: Tensor
    """[N] int64, host: packed positions, sorted."""
    labels: Tensor
    """[M] int64, host."""
    teacher: Tensor
    """[M] int64, host: row of the final states that teaches the slot."""
    weights: Tensor
    """[M] float32, host: 0 where the slot does not count."""
    ids: Tensor
    """[M] int32: the anchor's token, then mask tokens."""
    previous: Tensor
    """[M] int32: the token before each slot's label."""
    context_positions: Tensor
    """[T] int32: position of each token in its document."""
    block_positions: Tensor
    """[M] int32: the same of each slot."""
    counts: Tensor
    """[G + 1] float32: blocks in which slot k counts, for each k; blocks."""
    layout: AnchoredLayout | None = None
    """Which keys each slot sees; made by `to`."""

    def to(self, device: torch.device) -> DSparkInputs:
        """The inputs on `device`; the host does not wait for it."""
        names = ("ids", "previous", "context_positions", "block_positions", "counts")
        moved = to_device([getattr(self, name).numpy() for name in names], device)
        layout = build_layout(self.cu_seqlens, self.anchors, self.block, window=self.window, device=device)
        return replace(self, layout=layout, **dict(zip(names, moved, strict=True)))


def draw_anchors(supervised: np.ndarray, count: int, seed: tuple[int, int, int]) -> np.ndarray:
    """Up to `count` sorted anchors of one document.

    Args:
        supervised: [S] bool.
        count: anchors wanted.
        seed: (run seed, epoch, position): all that the draw depends on.
    """
    candidates = np.flatnonzero(supervised[:-1] & supervised[1:])
    if candidates.size > count:
        candidates = np.random.default_rng(seed).choice(candidates, count, replace=False, shuffle=False)
        candidates.sort()
    return candidates


def prepare(
    batch: FeatureBatch,
    shape: DraftShape[DSparkConfig],
    seed: int,
    unsupervised: Literal["drop", "error"] = "drop",
) -> DSparkInputs:
    """A step's inputs from a packed batch; see `Method.prepare`."""
    tokens, supervised, offsets = batch.tokens.numpy(), batch.loss_mask.numpy(), batch.cu_seqlens.numpy()
    block = shape.config.block_size
    drawn = [
        start + draw_anchors(supervised[start:stop], shape.config.num_anchors, (seed, *position))
        for start, stop, position in zip(offsets[:-1], offsets[1:], batch.positions, strict=True)
    ]
    dropped = tuple(name for name, anchors in zip(batch.sample_ids, drawn, strict=True) if not anchors.size)
    if dropped and unsupervised == "error":
        raise ValueError(
            f"no two consecutive supervised tokens in {', '.join(dropped)}: "
            "remove them from data.train or set training.unsupervised to drop"
        )
    anchors = np.concatenate(drawn)
    # A run of supervised tokens ends at the next unsupervised one or at the end of its document.
    ends = np.append(~supervised, True)
    ends[offsets[1:]] = True
    breaks = np.flatnonzero(ends)
    valid = breaks[np.searchsorted(breaks, anchors + 1)] - anchors - 1
    blocks = anchors.size
    if not blocks:
        anchors, valid = np.zeros(1, np.int64), np.zeros(1, np.int64)
    slot = np.arange(block)
    counted = slot < valid[:, None]
    weights = np.where(counted, np.exp(-slot / shape.config.loss.decay), 0.0).astype(np.float32)
    row = np.minimum(anchors[:, None] + slot, tokens.size - 1)
    ids = np.full((anchors.size, block), shape.mask_token_id, np.int32)
    ids[:, 0] = tokens[anchors]
    first = offsets[np.searchsorted(offsets, anchors, side="right") - 1]

    def flat(values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype).reshape(-1))

    return DSparkInputs(
        weight_sum=float(weights.sum(dtype=np.float64)),
        dropped_ids=dropped,
        block=block,
        window=shape.config.sliding_window,
        cu_seqlens=batch.cu_seqlens,
        anchors=flat(anchors, np.int64),
        labels=flat(tokens[np.minimum(row + 1, tokens.size - 1)], np.int64),
        teacher=flat(row, np.int64),
        weights=flat(weights, np.float32),
        ids=flat(ids, np.int32),
        previous=flat(tokens[row], np.int32),
        context_positions=flat(np.arange(tokens.size) - np.repeat(offsets[:-1], np.diff(offsets)), np.int32),
        block_positions=flat((anchors - first)[:, None] + slot, np.int32),
        counts=flat(np.append(counted.sum(0), blocks), np.float32),
    )
