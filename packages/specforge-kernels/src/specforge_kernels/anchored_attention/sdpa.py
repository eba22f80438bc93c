"""Anchored attention through `scaled_dot_product_attention`, for CPUs.

The slots are cut into tiles of whole blocks of one document, and each tile attends to the context up to its
last anchor and to its own slots under a small dense mask: packed documents and later keys cost nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .blocks import Blocks, dense_mask
from .reference import joined_keys

TILE_SLOTS = 256
"""Slots of a tile at most (at least one block): on a CPU, large enough for the matrix products and small
enough for few masked keys.
"""


@dataclass(frozen=True)
class SlotTile:
    """Whole blocks of one document and the keys that they see."""

    slots: slice
    keys: slice
    """Context keys that some slot of the tile sees."""
    visible: Tensor
    """[slots, keys + slots] bool."""


def slot_tiles(blocks: Blocks, device: torch.device) -> tuple[SlotTile, ...]:
    """Tiles of whole blocks, in slot order."""
    intervals, size = blocks.intervals, blocks.size
    cuts = np.flatnonzero(np.diff(blocks.document)) + 1
    per_tile = max(1, TILE_SLOTS // size)
    tiles = []
    for group in np.split(np.arange(blocks.anchor.size), cuts):
        for i in range(0, group.size, per_tile):
            first, last = int(group[i]), int(group[i : i + per_tile][-1])
            slots = slice(first * size, (last + 1) * size)
            keys = slice(int(intervals.context[0, slots.start]), int(blocks.anchor[last]))
            context, own = (torch.from_numpy(x[:, slots]) for x in (intervals.context, intervals.own))
            visible = dense_mask(context - keys.start, own - slots.start, keys.stop - keys.start)
            tiles.append(SlotTile(slots, keys, visible.to(device)))
    return tuple(tiles)


def attend_sdpa(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    tiles: tuple[SlotTile, ...],
    scale: float,
) -> Tensor:
    """Shapes as `api.anchored_attention`."""
    groups = q.shape[1] // k_context.shape[1]
    outs = []
    for tile in tiles:
        out = F.scaled_dot_product_attention(
            q[tile.slots].transpose(0, 1)[None],
            joined_keys(k_context[tile.keys], k_block[tile.slots], groups)[None],
            joined_keys(v_context[tile.keys], v_block[tile.slots], groups)[None],
            attn_mask=tile.visible,
            scale=scale,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
