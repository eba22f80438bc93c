"""The blocks of a step, and the keys that each of their slots sees.

Slot `k` of block `j` (anchor at packed position `a`, in the document that starts at `d`) sees two key
intervals:

    context  [max(d, a + k - (w - 1)), a)        without a window `w`: [d, a)
    its own block  [j·G, j·G + G)                with a window, causal: [j·G, j·G + k + 1)

The target's state at the anchor does not exist yet when the block is drafted, hence context stops before it.
All masks and kernels here are written from these intervals; none is found by evaluating a mask over all
pairs. Source: DSpark (arXiv 2607.05147), DFlash (arXiv 2602.06036).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

KEY_TILE = 64
"""Context keys of one tile of `Blocks.slots_by_key_tile`."""


@dataclass(frozen=True)
class Intervals:
    """Key intervals of each slot, numpy int32: first and one past last."""

    context: np.ndarray
    """[2, M] packed positions."""
    own: np.ndarray
    """[2, M] slots."""


@dataclass(frozen=True)
class Blocks:
    """N blocks over T packed tokens, on the host."""

    tokens: int
    """T."""
    size: int
    """G, slots of a block."""
    window: int | None
    """Tokens that a slot sees, itself included."""
    document: np.ndarray
    """[N] int32: first packed position of the block's document."""
    anchor: np.ndarray
    """[N] int32: packed position of its anchor; sorted."""

    @property
    def slots(self) -> int:
        """M = N·G."""
        return self.anchor.size * self.size

    @cached_property
    def intervals(self) -> Intervals:
        """Each slot's key intervals."""
        start, stop = self.document.repeat(self.size), self.anchor.repeat(self.size)
        first = (np.arange(self.slots) // self.size * self.size).astype(np.int32)
        last = first + np.int32(self.size)
        if self.window is not None:
            slot = np.arange(self.slots, dtype=np.int32) - first
            start = np.maximum(start, stop + slot - (self.window - 1))
            last = first + slot + 1
        return Intervals(np.stack([start, stop]), np.stack([first, last]))

    def slots_by_key_tile(self) -> np.ndarray:
        """[4, tiles] int32: for each tile of KEY_TILE context keys, the slots [0, 3) of blocks that may see
        it, and among them the slots [1, 2) that see all of it.
        """
        tile = np.arange(0, self.tokens, KEY_TILE)
        # All bounds of a block's context rise with its anchor, so the blocks that reach a tile are a range.
        starts = [self.document, self.document]
        if self.window is not None:
            starts = [
                np.maximum(d, self.anchor + k - (self.window - 1))
                for d, k in zip(starts, (0, self.size - 1), strict=True)
            ]
        first = np.searchsorted(self.anchor, tile, side="right")
        last = np.searchsorted(starts[0], tile + KEY_TILE, side="left")
        full_first = np.searchsorted(self.anchor, tile + KEY_TILE, side="left")
        full_last = np.searchsorted(starts[1], tile, side="right")
        empty = full_first >= full_last
        bounds = np.stack([first, np.where(empty, last, full_first), np.where(empty, last, full_last), last])
        return (bounds * self.size).astype(np.int32)


def place_blocks(cu_seqlens: Tensor, anchors: Tensor, size: int, window: int | None) -> Blocks:
    """The blocks at some anchors of packed documents.

    Args:
        cu_seqlens: [B+1] int64 on the host, document offsets from 0 to T.
        anchors: [N] int64 on the host, packed positions of the anchor tokens, sorted.
        size: G.
        window: tokens a slot sees, itself included; at least G, so that a block always sees its own earlier
            slots.

    Raises:
        ValueError: offsets or anchors that are not sorted or out of range, a block under 1, or a window under
        G.
    """
    offsets, anchor = cu_seqlens.numpy(), anchors.numpy()
    if offsets.size < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, found {offsets.tolist()}")
    if size < 1:
        raise ValueError(f"block must be at least 1, found {size}")
    if window is not None and window < size:
        raise ValueError(f"the sliding window must cover the block ({size} slots), found {window}")
    if anchor.size and (anchor[0] < 0 or anchor[-1] >= offsets[-1] or (np.diff(anchor) < 0).any()):
        raise ValueError(
            f"anchors must be sorted packed positions below {offsets[-1]}, found {anchor.tolist()}"
        )
    document = offsets[np.searchsorted(offsets, anchor, side="right") - 1]
    return Blocks(int(offsets[-1]), size, window, document.astype(np.int32), anchor.astype(np.int32))


def dense_mask(context: Tensor, own: Tensor, tokens: int) -> Tensor:
    """[M, T + M] bool: what each slot sees of the context keys and of all block keys."""
    slots = context.shape[1]
    key = torch.arange(tokens, device=context.device)
    slot = torch.arange(slots, device=context.device)
    return torch.cat([
        (key >= context[0, :, None]) & (key < context[1, :, None]),
        (slot >= own[0, :, None]) & (slot < own[1, :, None]),
    ], dim=1)  # fmt: skip
