"""The element-wise work of a decoder layer in Triton: RMS norm, head norm with rotary, SwiGLU, each forward
and backward.

All of them compute in fp32 and round once. With r = 1 / sqrt(mean x² + ε), y = x r w and g = ∂loss/∂y,

    ∂loss/∂x = r (g w - x r · mean(g w x r))        ∂loss/∂w = Σ_rows g x r

A weight's gradient is summed by each program over its own rows and over the programs afterwards, in a fixed
order: the result is deterministic. Row counts are not specialised and widths are constants, so that every
kernel is compiled once for all lengths. Source of the definitions: reference.py.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..warm_up import Launches
from .reference import Rotary

HEAD_ROWS = 32
"""(row, head) pairs of one program."""
SWIGLU_COLUMNS = 2048
"""Columns of one program."""


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, weight_ptr, out_ptr, inverse_ptr, rows, eps, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """One row: x r w, and r."""
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    offset = tl.cast(row, tl.int64) * WIDTH + column
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, (x * inverse * weight).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(inverse_ptr + row, inverse)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    upstream_ptr, x_ptr, weight_ptr, inverse_ptr, residual_ptr, dx_ptr, normed_ptr, partial_ptr, rows,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Every n-th row: dx, plus the gradient that went around the norm, and the norm's output once more."""
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * WIDTH + column
        inverse = tl.load(inverse_ptr + row)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32) * inverse
        upstream = tl.load(upstream_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        total += upstream * x
        gradient = upstream * weight
        dx = (gradient - x * (tl.sum(gradient * x, axis=0) / WIDTH)) * inverse
        if residual_ptr is not None:
            dx += tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
            tl.store(normed_ptr + offset, (x * weight).to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + tl.program_id(0) * WIDTH + column, total, mask=inside)


@triton.jit
def _pairs(tile, rows, heads, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Offsets of the first halves of a tile's (row, head) pairs and of their tables, and what is inside."""
    pair = tile * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, HALF)[None, :]
    offset = pair.to(tl.int64)[:, None] * (2 * HALF) + column
    return offset, (pair // heads)[:, None] * HALF + column, (pair < rows * heads)[:, None]


@triton.jit
def _load_halves(ptr, offset, inside, HALF: tl.constexpr):
    first = tl.load(ptr + offset, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(ptr + offset + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, offset, first, second, inside, HALF: tl.constexpr):
    tl.store(ptr + offset, first.to(ptr.dtype.element_ty), mask=inside)
    tl.store(ptr + offset + HALF, second.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_weight(ptr, HALF: tl.constexpr):
    column = tl.arange(0, HALF)[None, :]
    return tl.load(ptr + column).to(tl.float32), tl.load(ptr + HALF + column).to(tl.float32)


@triton.jit
def _inverse_norm(first, second, eps, HALF: tl.constexpr):
    return tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + eps)[:, None]


@triton.jit
def _heads_tile(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, tile, rows, heads, eps,
    HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    offset, table, inside = _pairs(tile, rows, heads, HALF, PAIRS)
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0)
    first, second = _load_halves(x_ptr, offset, inside, HALF)
    inverse = _inverse_norm(first, second, eps, HALF)
    first_weight, second_weight = _load_weight(weight_ptr, HALF)
    first *= inverse * first_weight
    second *= inverse * second_weight
    _store_halves(out_ptr, offset, first * cos - second * sin, second * cos + first * sin, inside, HALF)


@triton.jit
def _heads_backward_tile(
    upstream_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, partial_ptr, tile, rows, heads, eps,
    HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    offset, table, inside = _pairs(tile, rows, heads, HALF, PAIRS)
    cos = tl.load(cos_ptr + table, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0)
    first_up, second_up = _load_halves(upstream_ptr, offset, inside, HALF)
    # The transpose of the rotation turns the gradient back.
    first_gradient = first_up * cos + second_up * sin
    second_gradient = second_up * cos - first_up * sin
    first, second = _load_halves(x_ptr, offset, inside, HALF)
    inverse = _inverse_norm(first, second, eps, HALF)
    first *= inverse
    second *= inverse
    partial = partial_ptr + tl.program_id(0) * (2 * HALF) + tl.arange(0, HALF)
    tl.store(partial, tl.sum(first_gradient * first, axis=0))
    tl.store(partial + HALF, tl.sum(second_gradient * second, axis=0))
    first_weight, second_weight = _load_weight(weight_ptr, HALF)
    first_gradient *= first_weight
    second_gradient *= second_weight
    mean = (tl.sum(first_gradient * first + second_gradient * second, axis=1) / (2 * HALF))[:, None]
    first = (first_gradient - first * mean) * inverse
    second = (second_gradient - second * mean) * inverse
    _store_halves(dx_ptr, offset, first, second, inside, HALF)


@triton.jit(do_not_specialize=["rows", "q_heads", "k_heads"])
def _heads_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    rows, q_heads, k_heads, eps, HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of a tile of queries or, past them, of keys."""
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(rows * q_heads, PAIRS)
    if tile < q_tiles:
        _heads_tile(q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, tile, rows, q_heads, eps, HALF, PAIRS)
    else:
        _heads_tile(
            k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, tile - q_tiles, rows, k_heads, eps, HALF, PAIRS
        )


@triton.jit(do_not_specialize=["rows", "q_heads", "k_heads"])
def _heads_backward_kernel(
    dq_ptr, dk_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, dq_out_ptr, dk_out_ptr,
    partial_ptr, rows, q_heads, k_heads, eps, HALF: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    q_tiles = tl.cdiv(rows * q_heads, PAIRS)
    if tile < q_tiles:
        _heads_backward_tile(
            dq_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, dq_out_ptr, partial_ptr,
            tile, rows, q_heads, eps, HALF, PAIRS,
        )  # fmt: skip
    else:
        _heads_backward_tile(
            dk_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, dk_out_ptr, partial_ptr,
            tile - q_tiles, rows, k_heads, eps, HALF, PAIRS,
        )  # fmt: skip


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    offset = tl.program_id(0).to(tl.int64) * WIDTH + column
    gate = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offset, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    upstream_ptr, gate_ptr, up_ptr, dup_ptr, out_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """The gate's gradient over `upstream`, the gradient of `up`, and the product once more."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    offset = tl.program_id(0).to(tl.int64) * WIDTH + column
    upstream = tl.load(upstream_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activated = gate * sigmoid
    dtype = out_ptr.dtype.element_ty
    tl.store(
        upstream_ptr + offset,
        (upstream * up * (sigmoid + activated * (1.0 - sigmoid))).to(dtype),
        mask=inside,
    )
    tl.store(dup_ptr + offset, (upstream * activated).to(dtype), mask=inside)
    tl.store(out_ptr + offset, (activated * up).to(dtype), mask=inside)


@functools.cache
def _programs(device: torch.device) -> int:
    """Programs that share the rows of a norm's backward: four on each processor."""
    if device.type != "cuda":
        return 3
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _row_options(width: int) -> dict[str, int]:
    columns = triton.next_power_of_2(width)
    return {"WIDTH": width, "COLUMNS": columns, "num_warps": min(max(columns // 512, 1), 16)}


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` [n, H] normed, and r [n] fp32 for the backward."""
    rows, width = x.shape
    out, inverse = torch.empty_like(x), x.new_empty(rows, dtype=torch.float32)
    kernel: Any = _norm_kernel[(rows,)]
    kernel(x, weight, out, inverse, rows, eps, **_row_options(width))
    return out, inverse


def norm_backward(
    upstream: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of `norm_forward`.

    Args:
        upstream: [n, H] gradient of the output.
        x, weight, inverse: of the forward.
        residual: [n, H] gradient of x from elsewhere, to be added.

    Returns:
        dx [n, H], dw [H], and with `residual` the normed x [n, H] once more.
    """
    rows, width = x.shape
    programs = min(rows, _programs(x.device))
    partial = x.new_empty(programs, width, dtype=torch.float32)
    dx, normed = torch.empty_like(x), None if residual is None else torch.empty_like(x)
    kernel: Any = _norm_backward_kernel[(programs,)]
    kernel(upstream, x, weight, inverse, residual, dx, normed, partial, rows, **_row_options(width))
    return dx, partial.sum(dim=0).to(weight.dtype), normed


def head_tiles(rows: int, heads: int) -> int:
    """Programs over `heads` heads of `rows` rows; as many rows of partial sums come from a backward."""
    return triton.cdiv(rows * heads, HEAD_ROWS)


def heads_forward(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, rotary: Rotary, eps: float
) -> tuple[Tensor, Tensor]:
    """Queries [n, Hq, D], Hq may be 0, and keys [n, Hkv, D] of the same rows, normed and rotated."""
    (rows, k_heads, dim), q_heads = k.shape, q.shape[1]
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    kernel: Any = _heads_kernel[(head_tiles(rows, q_heads) + head_tiles(rows, k_heads),)]
    kernel(
        q, k, q_weight, k_weight, *rotary, q_out, k_out, rows, q_heads, k_heads, eps,
        HALF=dim // 2, PAIRS=HEAD_ROWS, num_warps=4,
    )  # fmt: skip
    return q_out, k_out


def heads_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: Rotary,
    eps: float,
    partial: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of `heads_forward`'s q and k from those of its outputs.

    The weights' go to `partial` [tiles, D] fp32, to be summed: `head_tiles` rows of the queries, then of the
    keys.
    """
    (rows, k_heads, dim), q_heads = k.shape, q.shape[1]
    dq_out, dk_out = torch.empty_like(q), torch.empty_like(k)
    kernel: Any = _heads_backward_kernel[(partial.shape[0],)]
    kernel(
        dq, dk, q, k, q_weight, k_weight, *rotary, dq_out, dk_out, partial, rows, q_heads, k_heads, eps,
        HALF=dim // 2, PAIRS=HEAD_ROWS, num_warps=4,
    )  # fmt: skip
    return dq_out, dk_out


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) ⊙ up, [n, I] each."""
    rows, width = gate.shape
    columns = min(SWIGLU_COLUMNS, triton.next_power_of_2(width))
    out = torch.empty_like(gate)
    kernel: Any = _swiglu_kernel[(rows, triton.cdiv(width, columns))]
    kernel(gate, up, out, WIDTH=width, COLUMNS=columns, num_warps=4)
    return out


def swiglu_backward(upstream: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product once more; the first one takes `upstream`'s memory."""
    rows, width = gate.shape
    columns = min(SWIGLU_COLUMNS, triton.next_power_of_2(width))
    dup, out = torch.empty_like(up), torch.empty_like(gate)
    kernel: Any = _swiglu_backward_kernel[(rows, triton.cdiv(width, columns))]
    kernel(upstream, gate, up, dup, out, WIDTH=width, COLUMNS=columns, num_warps=4)
    return upstream, dup, out


def warm_up_layer(
    hidden: int, intermediate: int, dim: int, dtype: torch.dtype, device: torch.device
) -> Launches:
    """Launches of each kernel, for `warm_up.WarmUp`."""

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(*shape, dtype=of, device=device)

    row, weight, inverse = zeros(1, hidden), zeros(hidden), zeros(1, of=torch.float32)
    heads, head_weight, wide = zeros(1, 1, dim), zeros(dim), zeros(1, intermediate)
    rotary, partial = Rotary(*zeros(2, 1, dim // 2, of=torch.float32)), zeros(2, dim, of=torch.float32)

    def norm_backwards() -> None:
        norm_backward(row, row, weight, inverse)
        norm_backward(row, row, weight, inverse, row)

    return (
        lambda: norm_forward(row, weight, 1.0),
        norm_backwards,
        lambda: heads_forward(heads, heads, head_weight, head_weight, rotary, 1.0),
        lambda: heads_backward(heads, heads, heads, heads, head_weight, head_weight, rotary, 1.0, partial),
        lambda: swiglu_forward(wide, wide),
        lambda: swiglu_backward(wide, wide, wide),
    )
