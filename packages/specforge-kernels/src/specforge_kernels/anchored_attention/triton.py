"""Anchored attention in Triton: one pass over the context for a tile of blocks and all the query heads of a
key head.

A tile holds whole blocks: `ROWS` rows are (slot, query head) pairs, the heads of one key head next to each
other, so that seven slots × four grouped heads × four blocks share each key that is loaded. Anchors are
sorted, so the rows of a tile see nearly the same context [first, last): keys that all rows see need no mask.
The block's own keys are the tile's slots, one more small product; both parts meet in one running softmax.
Statistics are in units of log 2. (Triton knows no structs: hence the kernels' long lists of parameters.)

Backward runs twice over the pairs and uses no atomics, hence is deterministic: by tiles of rows for dq, and
for dk, dv of the tile's own slots, which no other tile sees; and by tiles of context keys for their dk, dv,
over the contiguous range of slots that see them, in parts that are summed afterwards so that short contexts
fill the device.
"""

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..policy import TILE_ROWS
from ..warm_up import Launches
from .blocks import KEY_TILE, Blocks
from .layout import AnchoredLayout, place_layout

KEYS = 64
"""Context keys of one step over the context."""
BACKWARD_ROWS = 64
"""Rows of one step in the backward by key tiles."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below any score, yet finite: a row that sees nothing (past the last slot) stays free of NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _slot_intervals(origins_ptr, slot, valid, blocks, window, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """First and one-past-last context key and own slot of each slot; see blocks.py. Empty where invalid."""
    block = slot // BLOCK
    start = tl.load(origins_ptr + block, mask=valid, other=0)
    stop = tl.load(origins_ptr + blocks + block, mask=valid, other=0)
    own_start = block * BLOCK
    if WINDOW:
        start = tl.where(valid, tl.maximum(start, stop + slot % BLOCK - (window - 1)), 0)
        own_stop = tl.where(valid, slot + 1, 0)
    else:
        own_stop = tl.where(valid, own_start + BLOCK, 0)
    return start, stop, own_start, own_stop


@triton.jit
def _tile_rows(blocks, key_heads, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """First slot of the tile; each row's slot, packed (slot, head) index and validity."""
    TILE_SLOTS: tl.constexpr = ROWS // (BLOCK * GROUP) * BLOCK
    first_slot = tl.program_id(0) * TILE_SLOTS
    row = tl.arange(0, ROWS)
    slot = first_slot + row // GROUP
    valid = (row < TILE_SLOTS * GROUP) & (slot < blocks * BLOCK)
    index = (slot * key_heads + tl.program_id(1)) * GROUP + row % GROUP
    return first_slot, slot, index.to(tl.int64), valid


@triton.jit
def _context_steps(start, stop, valid, KEYS: tl.constexpr):
    """First and last context key of the tile; steps of KEYS: `full` that all rows see, `before` and `after`
    them.
    """
    first = tl.min(tl.where(valid, start, 2147483647), axis=0)
    last = tl.max(stop, axis=0)
    before = tl.cdiv(tl.minimum(tl.max(start, axis=0), last) - first, KEYS)
    full_from = first + before * KEYS
    full_to = tl.min(tl.where(valid, stop, 2147483647), axis=0)
    full = tl.maximum(full_to - full_from, 0) // KEYS
    after = tl.cdiv(tl.maximum(last - full_from - full * KEYS, 0), KEYS)
    return first, last, before, full, after


@triton.jit
def _load_keys(
    ptr, first, stop, head, key_heads, KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr
):
    """[KEYS, DIM] of one head from position `first`; zeros from `stop` on if masked."""
    position = first + tl.arange(0, KEYS)
    offset = (position.to(tl.int64) * key_heads + head)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    if MASKED:
        return tl.load(ptr + offset, mask=(position < stop)[:, None], other=0.0)
    return tl.load(ptr + offset)


@triton.jit
def _seen(first, start, stop, KEYS: tl.constexpr):
    """[rows, KEYS]: does the row see the key."""
    key = first + tl.arange(0, KEYS)[None, :]
    return (key >= start[:, None]) & (key < stop[:, None])


@triton.jit
def _softmax_step(q, k, v, seen, out, total, highest, scale, MASKED: tl.constexpr):
    """The running softmax after the keys `k`: unnormalised output, sum and maximum."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    now = tl.maximum(highest, tl.max(scores, axis=1))
    keep = tl.exp2(highest - now)
    p = tl.exp2(scores - now[:, None])
    out = out * keep[:, None]
    out = tl.dot(p.to(v.dtype), v, out, input_precision="ieee")
    return out, total * keep + tl.sum(p, axis=1), now


@triton.jit
def _forward_steps(
    q, k_ptr, v_ptr, out, total, highest, start, stop, first, last, steps, before, gap, scale, key_heads,
    KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    for step in range(steps):
        key = first + step * KEYS + tl.where(step >= before, gap, 0)
        k = _load_keys(k_ptr, key, last, head, key_heads, KEYS, DIM, MASKED)
        v = _load_keys(v_ptr, key, last, head, key_heads, KEYS, DIM, MASKED)
        seen = _seen(key, start, stop, KEYS) if MASKED else True
        out, total, highest = _softmax_step(q, k, v, seen, out, total, highest, scale, MASKED)
    return out, total, highest


@triton.jit(do_not_specialize=["blocks", "window"])
def _forward_kernel(
    q_ptr, k_context_ptr, v_context_ptr, k_block_ptr, v_block_ptr, origins_ptr, out_ptr, log_sum_ptr,
    blocks, window, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first_slot, slot, index, valid = _tile_rows(blocks, key_heads, GROUP, BLOCK, ROWS)
    start, stop, own_start, own_stop = _slot_intervals(
        origins_ptr, slot, valid, blocks, window, BLOCK, WINDOW
    )
    offset = index[:, None] * DIM + tl.arange(0, DIM)[None, :]
    q = tl.load(q_ptr + offset, mask=valid[:, None], other=0.0)
    scale = scale * LOG2E
    out = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], LOWEST, tl.float32)

    k = _load_keys(k_block_ptr, first_slot, blocks * BLOCK, tl.program_id(1), key_heads, OWN, DIM, True)
    v = _load_keys(v_block_ptr, first_slot, blocks * BLOCK, tl.program_id(1), key_heads, OWN, DIM, True)
    seen = _seen(first_slot, own_start, own_stop, OWN)
    out, total, highest = _softmax_step(q, k, v, seen, out, total, highest, scale, True)

    first, last, before, full, after = _context_steps(start, stop, valid, KEYS)
    out, total, highest = _forward_steps(
        q, k_context_ptr, v_context_ptr, out, total, highest, start, stop, first + before * KEYS, last,
        full, 0, 0, scale, key_heads, KEYS, DIM, False,
    )  # fmt: skip
    out, total, highest = _forward_steps(
        q, k_context_ptr, v_context_ptr, out, total, highest, start, stop, first, last,
        before + after, before, full * KEYS, scale, key_heads, KEYS, DIM, True,
    )  # fmt: skip
    total = tl.where(valid, total, 1.0)
    tl.store(out_ptr + offset, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=valid[:, None])
    tl.store(log_sum_ptr + index, highest + tl.log2(total), mask=valid)


@triton.jit
def _score_gradient(q, k, v, upstream, log_sum, delta, seen, scale, MASKED: tl.constexpr):
    """p and ∂loss/∂(q·k) of [rows, keys]: ds = p (upstream·v - delta)."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    p = tl.exp2(scores - log_sum[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    return p, p * (tl.dot(upstream, tl.trans(v), input_precision="ieee") - delta[:, None])


@triton.jit
def _query_gradient_steps(
    q, k_ptr, v_ptr, upstream, dq, log_sum, delta, start, stop,
    first, last, steps, before, gap, scale, key_heads,
    KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    for step in range(steps):
        key = first + step * KEYS + tl.where(step >= before, gap, 0)
        k = _load_keys(k_ptr, key, last, head, key_heads, KEYS, DIM, MASKED)
        v = _load_keys(v_ptr, key, last, head, key_heads, KEYS, DIM, MASKED)
        seen = _seen(key, start, stop, KEYS) if MASKED else True
        _, ds = _score_gradient(q, k, v, upstream, log_sum, delta, seen, scale, MASKED)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["blocks", "window"])
def _row_backward_kernel(
    q_ptr, k_context_ptr, v_context_ptr, k_block_ptr, v_block_ptr, origins_ptr,
    out_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dq_ptr, dk_block_ptr, dv_block_ptr,
    blocks, window, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows, dk and dv of its slots, and delta = out·upstream for the other kernel."""
    first_slot, slot, index, valid = _tile_rows(blocks, key_heads, GROUP, BLOCK, ROWS)
    start, stop, own_start, own_stop = _slot_intervals(
        origins_ptr, slot, valid, blocks, window, BLOCK, WINDOW
    )
    column = tl.arange(0, DIM)[None, :]
    offset = index[:, None] * DIM + column
    q = tl.load(q_ptr + offset, mask=valid[:, None], other=0.0)
    upstream = tl.load(upstream_ptr + offset, mask=valid[:, None], other=0.0)
    out = tl.load(out_ptr + offset, mask=valid[:, None], other=0.0)
    delta = tl.sum(out.to(tl.float32) * upstream.to(tl.float32), axis=1)
    tl.store(delta_ptr + index, delta, mask=valid)
    log_sum = tl.load(log_sum_ptr + index, mask=valid, other=0.0)
    log2_scale = scale * LOG2E

    k = _load_keys(k_block_ptr, first_slot, blocks * BLOCK, tl.program_id(1), key_heads, OWN, DIM, True)
    v = _load_keys(v_block_ptr, first_slot, blocks * BLOCK, tl.program_id(1), key_heads, OWN, DIM, True)
    seen = _seen(first_slot, own_start, own_stop, OWN)
    p, ds = _score_gradient(q, k, v, upstream, log_sum, delta, seen, log2_scale, True)
    dq = tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    own = first_slot + tl.arange(0, OWN)
    own_offset = (own.to(tl.int64) * key_heads + tl.program_id(1))[:, None] * DIM + column
    # Slots past the tile's whole blocks belong to the next tile.
    in_tile = ((own < first_slot + ROWS // (BLOCK * GROUP) * BLOCK) & (own < blocks * BLOCK))[:, None]
    dv = tl.dot(tl.trans(p.to(q.dtype)), upstream, input_precision="ieee")
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee") * scale
    tl.store(dv_block_ptr + own_offset, dv.to(q.dtype), mask=in_tile)
    tl.store(dk_block_ptr + own_offset, dk.to(q.dtype), mask=in_tile)

    first, last, before, full, after = _context_steps(start, stop, valid, KEYS)
    dq = _query_gradient_steps(
        q, k_context_ptr, v_context_ptr, upstream, dq, log_sum, delta, start, stop,
        first + before * KEYS, last, full, 0, 0, log2_scale, key_heads, KEYS, DIM, False,
    )  # fmt: skip
    dq = _query_gradient_steps(
        q, k_context_ptr, v_context_ptr, upstream, dq, log_sum, delta, start, stop,
        first, last, before + after, before, full * KEYS, log2_scale, key_heads, KEYS, DIM, True,
    )  # fmt: skip
    tl.store(dq_ptr + offset, (dq * scale).to(q.dtype), mask=valid[:, None])


@triton.jit
def _key_gradient_steps(
    q_ptr, k, v, origins_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dk, dv, key,
    first, last, begin, end, before, gap, blocks, window, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Steps `begin` to `end` of ROWS rows; everything is [keys, rows], so that no product turns a tile
    around.
    """
    head = tl.program_id(1)
    for step in range(begin, end):
        row = first + step * ROWS + tl.where(step >= before, gap, 0) + tl.arange(0, ROWS)
        valid = row < last
        slot = row // GROUP
        index = (slot * key_heads + head).to(tl.int64) * GROUP + row % GROUP
        offset = index[:, None] * DIM + tl.arange(0, DIM)[None, :]
        q = tl.load(q_ptr + offset, mask=valid[:, None], other=0.0)
        upstream = tl.load(upstream_ptr + offset, mask=valid[:, None], other=0.0)
        log_sum = tl.load(log_sum_ptr + index, mask=valid, other=0.0)
        delta = tl.load(delta_ptr + index, mask=valid, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E) - log_sum[None, :])
        if MASKED:
            start, stop, _, _ = _slot_intervals(origins_ptr, slot, valid, blocks, window, BLOCK, WINDOW)
            p = tl.where((key[:, None] >= start[None, :]) & (key[:, None] < stop[None, :]), p, 0.0)
        dv = tl.dot(p.to(q.dtype), upstream, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(upstream), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["tokens", "blocks", "window"])
def _key_backward_kernel(
    q_ptr, k_ptr, v_ptr, origins_ptr, visible_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dk_ptr, dv_ptr,
    tokens, blocks, window, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of context keys from one part of the rows that see it, fp32 [parts, T, Hkv,
    DIM].
    """
    tile, tiles, head = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)
    key = tile * KEYS + tl.arange(0, KEYS)
    k = _load_keys(k_ptr, tile * KEYS, tokens, head, key_heads, KEYS, DIM, True)
    v = _load_keys(v_ptr, tile * KEYS, tokens, head, key_heads, KEYS, DIM, True)
    first = tl.load(visible_ptr + tile) * GROUP
    full_first = tl.load(visible_ptr + tiles + tile) * GROUP
    full_last = tl.load(visible_ptr + 2 * tiles + tile) * GROUP
    last = tl.load(visible_ptr + 3 * tiles + tile) * GROUP
    before = tl.cdiv(full_first - first, ROWS)
    full_from = first + before * ROWS
    full = tl.maximum(full_last - full_from, 0) // ROWS
    masked = before + tl.cdiv(tl.maximum(last - full_from - full * ROWS, 0), ROWS)
    dk = tl.zeros([KEYS, DIM], tl.float32)
    dv = tl.zeros([KEYS, DIM], tl.float32)
    share = tl.cdiv(full, parts)
    dk, dv = _key_gradient_steps(
        q_ptr, k, v, origins_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dk, dv, key,
        full_from, last, part * share, tl.minimum((part + 1) * share, full), 0, 0,
        blocks, window, key_heads, scale, GROUP, BLOCK, WINDOW, DIM, ROWS, False,
    )  # fmt: skip
    # From the last part backwards: with few steps, the first parts hold the longer share of the others.
    share = tl.cdiv(masked, parts)
    other = parts - 1 - part
    dk, dv = _key_gradient_steps(
        q_ptr, k, v, origins_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dk, dv, key,
        first, last, other * share, tl.minimum((other + 1) * share, masked), before, full * ROWS,
        blocks, window, key_heads, scale, GROUP, BLOCK, WINDOW, DIM, ROWS, True,
    )  # fmt: skip
    offset = ((part.to(tl.int64) * tokens + key) * key_heads + head)[:, None] * DIM + tl.arange(0, DIM)[
        None, :
    ]
    tl.store(dk_ptr + offset, dk * scale, mask=(key < tokens)[:, None])
    tl.store(dv_ptr + offset, dv, mask=(key < tokens)[:, None])


@functools.cache
def _parts(programs: int, device: torch.device) -> int:
    """Parts of the rows in the backward by key tiles: enough programs for eight on each processor."""
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(8, -(-8 * processors // programs)))


def _row_launch(
    inputs: tuple[Tensor, ...], layout: AnchoredLayout, scale: float
) -> tuple[tuple[int, int], tuple[float, ...], dict[str, int]]:
    """Grid, sizes and constants of the kernels by rows."""
    (_, heads, dim), key_heads, blocks = inputs[0].shape, inputs[1].shape[1], layout.blocks
    group = heads // key_heads
    tile_slots = TILE_ROWS // (blocks.size * group) * blocks.size
    constants = {
        "GROUP": group,
        "BLOCK": blocks.size,
        "WINDOW": blocks.window is not None,
        "DIM": dim,
        "ROWS": TILE_ROWS,
        "OWN": max(16, triton.next_power_of_2(tile_slots)),
        "KEYS": KEYS,
    }
    grid = (triton.cdiv(blocks.slots, tile_slots), key_heads)
    return grid, (blocks.anchor.size, blocks.window or 0, key_heads, scale), constants


def _forward(inputs: tuple[Tensor, ...], layout: AnchoredLayout, scale: float) -> tuple[Tensor, Tensor]:
    """Output [M, Hq, D] and log-sum-exps [M, Hq] from the five tensors of `api.anchored_attention`."""
    q = inputs[0]
    grid, sizes, constants = _row_launch(inputs, layout, scale)
    out, log_sum = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    kernel: Any = _forward_kernel[grid]
    kernel(*inputs, layout.origins, out, log_sum, *sizes, **constants, num_warps=8, num_stages=3)
    return out, log_sum


def _backward_by_rows(
    inputs: tuple[Tensor, ...],
    out: Tensor,
    log_sum: Tensor,
    upstream: Tensor,
    layout: AnchoredLayout,
    scale: float,
) -> tuple[Tensor, ...]:
    """dq, the block keys' and values' gradients, and delta [M, Hq]."""
    q, _, _, k_block, v_block = inputs
    grid, sizes, constants = _row_launch(inputs, layout, scale)
    delta, dq = torch.empty_like(log_sum), torch.empty_like(q)
    dk_block, dv_block = torch.empty_like(k_block), torch.empty_like(v_block)
    kernel: Any = _row_backward_kernel[grid]
    kernel(
        *inputs, layout.origins, out, log_sum, upstream, delta, dq, dk_block, dv_block,
        *sizes, **constants, num_warps=8, num_stages=3,
    )  # fmt: skip
    return dq, dk_block, dv_block, delta


def _backward_by_keys(
    inputs: tuple[Tensor, ...],
    log_sum: Tensor,
    upstream: Tensor,
    delta: Tensor,
    layout: AnchoredLayout,
    scale: float,
) -> Tensor:
    """[2, T, Hkv, D] the context keys' and values' gradients, fp32."""
    q, k_context, v_context, _, _ = inputs
    _, sizes, constants = _row_launch(inputs, layout, scale)
    (tokens, key_heads, dim), tiles = k_context.shape, layout.visible_slots.shape[1]
    parts = _parts(tiles * key_heads, q.device)
    partial = q.new_empty(2, parts, tokens, key_heads, dim, dtype=torch.float32)
    kernel: Any = _key_backward_kernel[(tiles, key_heads, parts)]
    kernel(
        q, k_context, v_context, layout.origins, layout.visible_slots, log_sum, upstream, delta, *partial,
        tokens, *sizes, **{name: constants[name] for name in ("GROUP", "BLOCK", "WINDOW", "DIM")},
        ROWS=BACKWARD_ROWS, KEYS=KEY_TILE, num_warps=4, num_stages=2,
    )  # fmt: skip
    return partial.sum(dim=1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: AnchoredLayout, scale: float, *inputs: Tensor) -> Tensor:
        out, log_sum = _forward(inputs, layout, scale)
        ctx.save_for_backward(*inputs, out, log_sum)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, out, log_sum = ctx.saved_tensors
        inputs, upstream, place = tuple(inputs), upstream.contiguous(), (ctx.layout, ctx.scale)
        dq, dk_block, dv_block, delta = _backward_by_rows(inputs, out, log_sum, upstream, *place)
        dk_context, dv_context = _backward_by_keys(inputs, log_sum, upstream, delta, *place).to(dq.dtype)
        return None, None, dq, dk_context, dv_context, dk_block, dv_block


def warm_up_attention(
    heads: int,
    key_heads: int,
    dim: int,
    block: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Launches:
    """Launches of each kernel, for `warm_up.WarmUp`; shapes as `api.anchored_attention`."""
    layout = place_layout(Blocks(1, block, window, *np.zeros((2, 1), np.int32)), device, "triton")
    rows = ((block, heads), (1, key_heads), (1, key_heads), (block, key_heads), (block, key_heads))
    inputs = tuple(torch.zeros(*r, dim, dtype=dtype, device=device) for r in rows)
    q, statistics = inputs[0], torch.zeros(block, heads, device=device)
    return (
        lambda: _forward(inputs, layout, 1.0),
        lambda: _backward_by_rows(inputs, q, statistics, q, layout, 1.0),
        lambda: _backward_by_keys(inputs, statistics, q, statistics, layout, 1.0),
    )


def attend_triton(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: AnchoredLayout,
    scale: float,
) -> Tensor:
    """Shapes as `api.anchored_attention`."""
    inputs = (x.contiguous() for x in (q, k_context, v_context, k_block, v_block))
    return _Attention.apply(layout, scale, *inputs)
