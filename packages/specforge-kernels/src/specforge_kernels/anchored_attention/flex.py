"""Anchored attention through FlexAttention.

Keys are the context followed by all block keys (`T + M`). A tile of 128 queries × 128 keys is *full* when
every query's interval covers it and *partial* when it touches the hull of the intervals; both follow from
four minima and maxima a query tile, so the BlockMask costs O(query tiles × key tiles) on the host. The mask
function itself captures tensors only: a captured integer would recompile at every length.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..transfer import to_device
from .blocks import Blocks

TILE = 128
"""Queries and keys of a BlockMask tile."""


def tile_kinds(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full), each [query tiles, key tiles] bool."""
    intervals, tokens, slots = blocks.intervals, blocks.tokens, blocks.slots
    first = np.arange(0, slots, TILE)
    (start, stop), (own_start, own_stop) = intervals.context, intervals.own
    lowest, highest = np.minimum.reduceat(start, first), np.maximum.reduceat(stop, first)
    full_from, full_to = np.maximum.reduceat(start, first), np.minimum.reduceat(stop, first)
    own_from = tokens + np.minimum.reduceat(own_start, first)
    own_to = tokens + np.maximum.reduceat(own_stop, first)
    key = np.arange(0, tokens + slots, TILE)
    end = np.minimum(key + TILE, tokens + slots)
    column = lambda x: x[:, None]  # noqa: E731
    full = (key >= column(full_from)) & (end <= column(full_to))
    context = (end > column(lowest)) & (key < column(highest))
    own = (end > column(own_from)) & (key < column(own_to))
    return (context | own) & ~full, full


def ordered(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """BlockMask's row form of [rows, columns] bool: counts [1, 1, rows] and the columns, chosen ones first,
    [1, 1, rows, columns].
    """
    order = np.argsort(~kinds, axis=1, kind="stable")
    return kinds.sum(1, dtype=np.int32)[None, None], order.astype(np.int32)[None, None]


def build_block_mask(blocks: Blocks, device: torch.device) -> BlockMask:
    """The BlockMask of M query slots over T + M keys."""
    partial, full = tile_kinds(blocks)
    rows = [x for kinds in (partial, full, partial.T, full.T) for x in ordered(kinds)]
    intervals, tokens, slots = blocks.intervals, blocks.tokens, blocks.slots
    own = intervals.own + np.int32(tokens)
    *rows, start, stop, own_start, own_stop = to_device([*rows, *intervals.context, *own], device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key >= start[query]) & (key < stop[query])
        return context | ((key >= own_start[query]) & (key < own_stop[query]))

    return BlockMask((slots, tokens + slots), *rows, BLOCK_SIZE=(TILE, TILE), mask_mod=visible)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def attend_flex(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    block_mask: BlockMask,
    scale: float,
    kernels: str = "TRITON",
) -> Tensor:
    """Shapes as `api.anchored_attention`; `kernels` is TRITON or FLASH. Runs FlexAttention's dense definition
    on a CPU, for tests.
    """
    attention: Any = _compiled() if q.is_cuda else flex_attention
    out = attention(
        q.transpose(0, 1)[None],
        torch.cat([k_context, k_block]).transpose(0, 1)[None],
        torch.cat([v_context, v_block]).transpose(0, 1)[None],
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k_context.shape[1],
        kernel_options={"BACKEND": kernels},
    )
    return out[0].transpose(0, 1)
