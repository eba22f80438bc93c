"""Anchored attention in Triton: one pass over the context for a tile of blocks and all the query heads of a key head.

A tile holds whole blocks: `ROWS` rows are (slot, query head) pairs, the heads of one key head next to each other, so that seven
slots × four grouped heads × four blocks share each key that is loaded. Anchors are sorted, so the rows of a tile see nearly the same
context [first, last): keys that all rows see need no mask. The block's own keys are the tile's slots, one more small product; both
parts meet in one running softmax. Statistics are in units of log 2.

Backward runs twice over the pairs and uses no atomics, hence is deterministic:
- by tiles of rows: dq, and dk, dv of the tile's own slots, which no other tile sees;
- by tiles of context keys: dk, dv of the context, over the contiguous range of slots that may see them, split into parts that are
  summed afterwards where the context is too short to fill the device.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import KEY_TILE, AnchoredLayout

ROWS = 128
"""(slot, head) pairs of a tile."""
KEYS = 64
"""Context keys of one step over the context."""
BACKWARD_ROWS = 64
"""Rows of one step in the backward by key tiles."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Below any score, yet finite: a row that sees nothing (past the last slot) stays free of NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _tile_rows(context_ptr, own_ptr, slots, key_heads, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """First slot of the tile; each row's packed (slot, head) index, validity, and key intervals (empty where invalid)."""
    TILE_SLOTS: tl.constexpr = ROWS // (BLOCK * GROUP) * BLOCK
    first_slot = tl.program_id(0) * TILE_SLOTS
    row = tl.arange(0, ROWS)
    slot = first_slot + row // GROUP
    valid = (row < TILE_SLOTS * GROUP) & (slot < slots)
    index = (slot * key_heads + tl.program_id(1)) * GROUP + row % GROUP
    start = tl.load(context_ptr + slot, mask=valid, other=0)
    stop = tl.load(context_ptr + slots + slot, mask=valid, other=0)
    own_start = tl.load(own_ptr + slot, mask=valid, other=0)
    own_stop = tl.load(own_ptr + slots + slot, mask=valid, other=0)
    return first_slot, index.to(tl.int64), valid, start, stop, own_start, own_stop


@triton.jit
def _context_steps(start, stop, valid, KEYS: tl.constexpr):
    """Bounds of three runs over the context: some rows see the keys, all rows, some rows; steps of KEYS from the first key."""
    first = tl.min(tl.where(valid, start, 2147483647), axis=0)
    last = tl.max(stop, axis=0)
    full_from = first + tl.cdiv(tl.max(start, axis=0) - first, KEYS) * KEYS
    full_to = tl.min(tl.where(valid, stop, 2147483647), axis=0)
    full_to = full_from + tl.maximum(full_to - full_from, 0) // KEYS * KEYS
    return first, tl.minimum(full_from, last), tl.minimum(full_to, last), last


@triton.jit
def _load_keys(ptr, first, stop, head, key_heads, KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
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
def _forward_run(
    q, k_ptr, v_ptr, out, total, highest, start, stop, begin, end, scale, key_heads,
    KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    for first in range(begin, end, KEYS):
        k = _load_keys(k_ptr, first, end, head, key_heads, KEYS, DIM, MASKED)
        v = _load_keys(v_ptr, first, end, head, key_heads, KEYS, DIM, MASKED)
        seen = _seen(first, start, stop, KEYS) if MASKED else True
        out, total, highest = _softmax_step(q, k, v, seen, out, total, highest, scale, MASKED)
    return out, total, highest


@triton.jit
def _forward_kernel(
    q_ptr, k_context_ptr, v_context_ptr, k_block_ptr, v_block_ptr, context_ptr, own_ptr, out_ptr, log_sum_ptr,
    slots, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    first_slot, index, valid, start, stop, own_start, own_stop = _tile_rows(
        context_ptr, own_ptr, slots, key_heads, GROUP, BLOCK, ROWS
    )
    offset = index[:, None] * DIM + tl.arange(0, DIM)[None, :]
    q = tl.load(q_ptr + offset, mask=valid[:, None], other=0.0)
    scale = scale * LOG2E
    out = tl.zeros([ROWS, DIM], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    highest = tl.full([ROWS], LOWEST, tl.float32)

    k = _load_keys(k_block_ptr, first_slot, slots, tl.program_id(1), key_heads, OWN, DIM, True)
    v = _load_keys(v_block_ptr, first_slot, slots, tl.program_id(1), key_heads, OWN, DIM, True)
    seen = _seen(first_slot, own_start, own_stop, OWN)
    out, total, highest = _softmax_step(q, k, v, seen, out, total, highest, scale, True)

    first, full_from, full_to, last = _context_steps(start, stop, valid, KEYS)
    out, total, highest = _forward_run(
        q, k_context_ptr, v_context_ptr, out, total, highest, start, stop, first, full_from, scale, key_heads, KEYS, DIM, True
    )
    out, total, highest = _forward_run(
        q, k_context_ptr, v_context_ptr, out, total, highest, start, stop, full_from, full_to, scale, key_heads, KEYS, DIM, False
    )
    out, total, highest = _forward_run(
        q, k_context_ptr, v_context_ptr, out, total, highest, start, stop, full_to, last, scale, key_heads, KEYS, DIM, True
    )
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
def _query_gradient_run(
    q, k_ptr, v_ptr, upstream, dq, log_sum, delta, start, stop, begin, end, scale, key_heads,
    KEYS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    for first in range(begin, end, KEYS):
        k = _load_keys(k_ptr, first, end, head, key_heads, KEYS, DIM, MASKED)
        v = _load_keys(v_ptr, first, end, head, key_heads, KEYS, DIM, MASKED)
        seen = _seen(first, start, stop, KEYS) if MASKED else True
        _, ds = _score_gradient(q, k, v, upstream, log_sum, delta, seen, scale, MASKED)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _row_backward_kernel(
    q_ptr, k_context_ptr, v_context_ptr, k_block_ptr, v_block_ptr, context_ptr, own_ptr,
    out_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dq_ptr, dk_block_ptr, dv_block_ptr,
    slots, key_heads, scale,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows, dk and dv of its slots, and delta = out·upstream for the other kernel."""
    first_slot, index, valid, start, stop, own_start, own_stop = _tile_rows(
        context_ptr, own_ptr, slots, key_heads, GROUP, BLOCK, ROWS
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

    k = _load_keys(k_block_ptr, first_slot, slots, tl.program_id(1), key_heads, OWN, DIM, True)
    v = _load_keys(v_block_ptr, first_slot, slots, tl.program_id(1), key_heads, OWN, DIM, True)
    seen = _seen(first_slot, own_start, own_stop, OWN)
    p, ds = _score_gradient(q, k, v, upstream, log_sum, delta, seen, log2_scale, True)
    dq = tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    own = first_slot + tl.arange(0, OWN)
    own_offset = (own.to(tl.int64) * key_heads + tl.program_id(1))[:, None] * DIM + column
    # Slots past the tile's whole blocks belong to the next tile.
    in_tile = ((own < first_slot + ROWS // (BLOCK * GROUP) * BLOCK) & (own < slots))[:, None]
    dv = tl.dot(tl.trans(p.to(q.dtype)), upstream, input_precision="ieee")
    dk = tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee") * scale
    tl.store(dv_block_ptr + own_offset, dv.to(q.dtype), mask=in_tile)
    tl.store(dk_block_ptr + own_offset, dk.to(q.dtype), mask=in_tile)

    first, full_from, full_to, last = _context_steps(start, stop, valid, KEYS)
    dq = _query_gradient_run(
        q, k_context_ptr, v_context_ptr, upstream, dq, log_sum, delta, start, stop, first, full_from, log2_scale,
        key_heads, KEYS, DIM, True,
    )  # fmt: skip
    dq = _query_gradient_run(
        q, k_context_ptr, v_context_ptr, upstream, dq, log_sum, delta, start, stop, full_from, full_to, log2_scale,
        key_heads, KEYS, DIM, False,
    )  # fmt: skip
    dq = _query_gradient_run(
        q, k_context_ptr, v_context_ptr, upstream, dq, log_sum, delta, start, stop, full_to, last, log2_scale,
        key_heads, KEYS, DIM, True,
    )  # fmt: skip
    tl.store(dq_ptr + offset, (dq * scale).to(q.dtype), mask=valid[:, None])


@triton.jit
def _key_backward_kernel(
    q_ptr, k_ptr, v_ptr, context_ptr, visible_ptr, log_sum_ptr, upstream_ptr, delta_ptr, dk_ptr, dv_ptr,
    tokens, slots, key_heads, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of context keys from one part of the rows that may see it, fp32 [parts, T, Hkv, DIM]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    part, parts = tl.program_id(2), tl.num_programs(2)
    first_key = tile * KEYS
    key = first_key + tl.arange(0, KEYS)
    k = _load_keys(k_ptr, first_key, tokens, head, key_heads, KEYS, DIM, True)
    v = _load_keys(v_ptr, first_key, tokens, head, key_heads, KEYS, DIM, True)
    first_row = tl.load(visible_ptr + tile) * GROUP
    last_row = tl.load(visible_ptr + tl.num_programs(0) + tile) * GROUP
    size = tl.cdiv(tl.cdiv(last_row - first_row, parts), ROWS) * ROWS
    first_row += part * size
    last_row = tl.minimum(first_row + size, last_row)
    column = tl.arange(0, DIM)[None, :]
    dk = tl.zeros([KEYS, DIM], tl.float32)
    dv = tl.zeros([KEYS, DIM], tl.float32)
    for first in range(first_row, last_row, ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < last_row
        slot = row // GROUP
        index = (slot * key_heads + head).to(tl.int64) * GROUP + row % GROUP
        start = tl.load(context_ptr + slot, mask=valid, other=0)
        stop = tl.load(context_ptr + slots + slot, mask=valid, other=0)
        offset = index[:, None] * DIM + column
        q = tl.load(q_ptr + offset, mask=valid[:, None], other=0.0)
        upstream = tl.load(upstream_ptr + offset, mask=valid[:, None], other=0.0)
        log_sum = tl.load(log_sum_ptr + index, mask=valid, other=0.0)
        delta = tl.load(delta_ptr + index, mask=valid, other=0.0)
        # [keys, rows] throughout, so that no product needs a transposed register tile
        p = tl.exp2(tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E) - log_sum[None, :])
        p = tl.where((key[:, None] >= start[None, :]) & (key[:, None] < stop[None, :]), p, 0.0)
        dv = tl.dot(p.to(q.dtype), upstream, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(upstream), input_precision="ieee") - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    offset = ((part.to(tl.int64) * tokens + key) * key_heads + head)[:, None] * DIM + column
    tl.store(dk_ptr + offset, (dk * scale).to(dk_ptr.dtype.element_ty), mask=(key < tokens)[:, None])
    tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=(key < tokens)[:, None])


@functools.cache
def _parts(tiles: int, device: torch.device) -> int:
    """Parts of the rows in the backward by key tiles: enough programs for two rounds of the device's processors."""
    if device.type != "cuda":
        return 2
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(16, -(-2 * processors // tiles)))


def _tiling(q: Tensor, k_context: Tensor, block: int) -> tuple[int, dict[str, int]]:
    """Tiles of rows, and the kernels' constants."""
    group = q.shape[1] // k_context.shape[1]
    tile_slots = ROWS // (block * group) * block
    constants = {
        "GROUP": group,
        "BLOCK": block,
        "DIM": q.shape[2],
        "ROWS": ROWS,
        "OWN": max(16, triton.next_power_of_2(tile_slots)),
        "KEYS": KEYS,
    }
    return triton.cdiv(q.shape[0], tile_slots), constants


@torch.library.custom_op("specforge::anchored_attention", mutates_args=())
def _attend(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    context: Tensor,
    own: Tensor,
    visible_slots: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [M, Hq, D] and log-sum-exps [M, Hq] in units of log 2."""
    slots, heads, _ = q.shape
    tiles, constants = _tiling(q, k_context, block)
    out = torch.empty_like(q)
    log_sum = q.new_empty(slots, heads, dtype=torch.float32)
    _forward_kernel[(tiles, k_context.shape[1])](
        q, k_context, v_context, k_block, v_block, context, own, out, log_sum,
        slots, k_context.shape[1], scale, **constants, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out, log_sum


@_attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("specforge::anchored_attention_backward", mutates_args=())
def _attend_backward(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    context: Tensor,
    own: Tensor,
    visible_slots: Tensor,
    out: Tensor,
    log_sum: Tensor,
    upstream: Tensor,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five inputs."""
    tokens, key_heads, dim = k_context.shape
    tiles, constants = _tiling(q, k_context, block)
    delta = torch.empty_like(log_sum)
    dq, dk_block, dv_block = torch.empty_like(q), torch.empty_like(k_block), torch.empty_like(v_block)
    _row_backward_kernel[(tiles, key_heads)](
        q, k_context, v_context, k_block, v_block, context, own, out, log_sum, upstream,
        delta, dq, dk_block, dv_block, q.shape[0], key_heads, scale, **constants, num_warps=8, num_stages=2,
    )  # fmt: skip
    key_tiles = visible_slots.shape[1]
    parts = _parts(key_tiles * key_heads, q.device)
    partial = q.new_empty(2, parts, tokens, key_heads, dim, dtype=torch.float32)
    _key_backward_kernel[(key_tiles, key_heads, parts)](
        q, k_context, v_context, context, visible_slots, log_sum, upstream, delta, partial[0], partial[1],
        tokens, q.shape[0], key_heads, scale,
        GROUP=constants["GROUP"], DIM=dim, ROWS=BACKWARD_ROWS, KEYS=KEY_TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    dk_context, dv_context = partial.sum(dim=1).to(q.dtype).unbind()
    return dq, dk_context, dv_context.clone(), dk_block, dv_block


@_attend_backward.register_fake
def _(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (q, k_context, v_context, k_block, v_block))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _attend_backward(*ctx.saved_tensors, upstream.contiguous(), ctx.block, ctx.scale)
    return *gradients, None, None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)


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
    out, _ = _attend(*inputs, layout.context, layout.own, layout.visible_slots, layout.block, scale)
    return out
