"""Which keys each query slot sees, from sorted anchors and document offsets.

Slot `k` of block `j` (anchor at packed position `a`, in the document that starts at `d`) sees two key
intervals:

    context  [max(d, a + k - (w - 1)), a)        without a window `w`: [d, a)
    its own block  [j·G, j·G + G)                with a window, causal: [j·G, j·G + k + 1)

The target's state at the anchor does not exist yet when the block is drafted, hence context stops before it.
All masks and kernels here are written from these intervals; none is found by evaluating a mask over all
pairs. Source: DSpark (arXiv 2607.05147), DFlash (arXiv 2602.06036).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..transfer import to_device

KEY_TILE = 64
"""Context keys of one tile of `visible_slots`."""


@dataclass(frozen=True)
class Intervals:
    """The intervals on the host, numpy int32."""

    context: np.ndarray
    """[2, M] packed positions: first and one past last."""
    own: np.ndarray
    """[2, M] block slots."""
    document: np.ndarray
    """[M] first packed position of the slot's document."""


@dataclass(frozen=True)
class SlotTile:
    """Whole blocks of one document and the keys that they see."""

    slots: slice
    keys: slice
    """Context keys that some slot of the tile sees."""
    visible: Tensor
    """[slots, keys + slots] bool."""


@dataclass(frozen=True)
class AnchoredLayout:
    """The intervals of `M = N·G` query slots over `T` context keys, on the device; built once a step, shared
    by all layers.
    """

    tokens: int
    """T, context keys."""
    block: int
    """G, slots of a block."""
    backend: str
    """The implementation `anchored_attention` uses; see `policy.choose_attention`."""
    context: Tensor
    """[2, M] int32: first and one-past-last context key of each slot."""
    own: Tensor
    """[2, M] int32: the same in block slots."""
    visible_slots: Tensor
    """[2, ceil(T / KEY_TILE)] int32: the range of slots that may see a tile of context keys (contiguous, as
    anchors are sorted).
    """
    tiles: tuple[SlotTile, ...] = ()
    """For `sdpa`."""
    block_mask: BlockMask | None = None
    """For the `flex` backends."""

    @property
    def slots(self) -> int:
        """M, query slots."""
        return self.context.shape[1]


def slot_intervals(cu_seqlens: Tensor, anchors: Tensor, block: int, window: int | None) -> Intervals:
    """The key intervals of each slot.

    Args:
        cu_seqlens: [B+1] int64 on the host, document offsets from 0 to T.
        anchors: [N] int64 on the host, packed positions of the anchor tokens, sorted.
        block: G.
        window: tokens a slot sees, itself included; at least G, so that a block always sees its own earlier
            slots.

    Raises:
        ValueError: offsets or anchors that are not sorted or out of range, a block under 1, or a window under
        G.
    """
    offsets, anchor = cu_seqlens.numpy(), anchors.numpy()
    if offsets.size < 2 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, found {offsets.tolist()}")
    if block < 1:
        raise ValueError(f"block must be at least 1, found {block}")
    if window is not None and window < block:
        raise ValueError(f"the sliding window must cover the block ({block} slots), found {window}")
    if anchor.size and (anchor[0] < 0 or anchor[-1] >= offsets[-1] or (np.diff(anchor) < 0).any()):
        raise ValueError(
            f"anchors must be sorted packed positions below {offsets[-1]}, found {anchor.tolist()}"
        )
    document = offsets[np.searchsorted(offsets, anchor, side="right") - 1].repeat(block)
    start, stop = document, anchor.repeat(block)
    first = np.arange(anchor.size).repeat(block) * block
    if window is None:
        last = first + block
    else:
        slot = np.tile(np.arange(block), anchor.size)
        start = np.maximum(start, stop + slot - (window - 1))
        last = first + slot + 1
    return Intervals(
        np.stack([start, stop]).astype(np.int32),
        np.stack([first, last]).astype(np.int32),
        document.astype(np.int32),
    )


def slots_by_key_tile(intervals: Intervals, block: int, tokens: int) -> np.ndarray:
    """[2, tiles] int32: for each tile of KEY_TILE context keys, the range of slots of the blocks that may see
    it.
    """
    tile = np.arange(0, tokens, KEY_TILE)
    # Both bounds of a block's context rise with its anchor, so the blocks that reach a tile are a range.
    start, stop = intervals.context[:, ::block]
    return np.stack(
        [
            np.searchsorted(stop, tile, side="right") * block,
            np.searchsorted(start, tile + KEY_TILE, side="left") * block,
        ]
    ).astype(np.int32)


def dense_mask(context: Tensor, own: Tensor, tokens: int) -> Tensor:
    """[M, T + M] bool: what each slot sees of the context keys and of all block keys."""
    slots = context.shape[1]
    key = torch.arange(tokens, device=context.device)
    slot = torch.arange(slots, device=context.device)
    return torch.cat([
        (key >= context[0, :, None]) & (key < context[1, :, None]),
        (slot >= own[0, :, None]) & (slot < own[1, :, None]),
    ], dim=1)  # fmt: skip


def place_layout(
    intervals: Intervals, tokens: int, block: int, device: torch.device, backend: str
) -> AnchoredLayout:
    """The layout on `device`, without a mask."""
    context, own, visible = to_device(
        [intervals.context, intervals.own, slots_by_key_tile(intervals, block, tokens)], device
    )
    return AnchoredLayout(tokens, block, backend, context, own, visible)
