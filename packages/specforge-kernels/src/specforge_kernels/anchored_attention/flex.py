"""Anchored attention through FlexAttention.

Keys are the context followed by all block keys (`T + M`). A tile of 128 queries × 128 keys is *full* when
every query's interval covers it and *partial* when it touches the hull of the intervals; both follow from
four minima and maxima a query tile, so the BlockMask costs O(query tiles × key tiles) on the host. The mask
function itself captures tensors only: a captured integer would recompile at every length.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..transfer import to_device
from .layout import AnchoredLayout, Intervals

TILE = 128
"""Queries and keys of a BlockMask tile."""


def unsupported_reason(device: torch.device, head_dim: int) -> str | None:
    """Why FlexAttention's Triton kernels cannot run here, or None."""
    if device.type != "cuda":
        return f"compiled FlexAttention with gradients needs CUDA, the device is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if head_dim < 16:
        return f"FlexAttention needs a head dimension of at least 16, found {head_dim}"
    return None


def flash_unsupported_reason(device: torch.device, head_dim: int) -> str | None:
    """Why FlexAttention's FLASH backend (CuTe kernels) cannot run here, or None."""
    if device.type != "cuda":
        return f"FLASH needs CUDA, the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 10:
        return f"FLASH pays on Blackwell (compute capability 10), the device has {major}.{minor}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "FLASH needs the package flash-attn-4 (flash_attn.cute), which is not installed"
    return unsupported_reason(device, head_dim)


def tile_kinds(intervals: Intervals, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(partial, full), each [query tiles, key tiles] bool."""
    slots = intervals.context.shape[1]
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


def build_block_mask(intervals: Intervals, tokens: int, device: torch.device) -> BlockMask:
    """The BlockMask of M query slots over T + M keys."""
    partial, full = tile_kinds(intervals, tokens)
    rows = [x for kinds in (partial, full, partial.T, full.T) for x in ordered(kinds)]
    own = intervals.own + tokens
    *rows, start, stop, own_start, own_stop = to_device(
        [*rows, *intervals.context, *own.astype(np.int32)], device
    )

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        context = (key >= start[query]) & (key < stop[query])
        return context | ((key >= own_start[query]) & (key < own_stop[query]))

    slots = intervals.context.shape[1]
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
    layout: AnchoredLayout,
    scale: float,
) -> Tensor:
    """Shapes as `api.anchored_attention`. Runs FlexAttention's dense definition on a CPU, for tests."""
    attention = _compiled() if q.is_cuda else flex_attention
    out = attention(
        q.transpose(0, 1)[None],
        torch.cat([k_context, k_block]).transpose(0, 1)[None],
        torch.cat([v_context, v_block]).transpose(0, 1)[None],
        block_mask=layout.block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k_context.shape[1],
        kernel_options={"BACKEND": "FLASH" if layout.backend == "flex-flash" else "TRITON"},
    )
    return out[0].transpose(0, 1)
