"""The fused layer as two autograd functions, one before and one after the attention.

Products are plain matrix products, all else runs in triton.py. Each function keeps what its backward cannot
make again cheaply: the layer's input, the projections before norm and rotation, gate and up. Normed inputs
and SwiGLU products come out of the kernels that read their arguments anyway. The residual passes through the
first function, so that its gradient is added where the norm's is written, not in a pass of its own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reference import AttentionWeights, OutputWeights, Projected, Rotary
from .triton import (
    head_tiles,
    heads_backward,
    heads_forward,
    norm_backward,
    norm_forward,
    swiglu_backward,
    swiglu_forward,
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out, inverse = norm_forward(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, _ = norm_backward(upstream.contiguous(), *ctx.saved_tensors)
        return dx, dweight, None


def _heads(x: Tensor, matrix: Tensor, weights: AttentionWeights) -> Tensor:
    """x [n, H] projected, as [n, heads, D]."""
    dim = weights.q_norm.shape[0]
    return torch.mm(x, matrix.t()).view(x.shape[0], matrix.shape[0] // dim, dim)


class _BeforeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        context: Tensor,
        rotary: Rotary,
        context_rotary: Rotary,
        eps: float,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = AttentionWeights(*parameters)
        normed, inverse = norm_forward(x, weights.norm, eps)
        q, k, v = (_heads(normed, w, weights) for w in (weights.q, weights.k, weights.v))
        k_context, v_context = (_heads(context, w, weights) for w in (weights.k, weights.v))
        norms = weights.q_norm, weights.k_norm
        q_turned, k_turned = heads_forward(q, k, *norms, rotary, eps)
        _, k_context_turned = heads_forward(k_context[:, :0], k_context, *norms, context_rotary, eps)
        ctx.save_for_backward(x, context, inverse, q, k, k_context, *rotary, *context_rotary, *parameters)
        ctx.eps = eps
        return x, q_turned, k_turned, v, k_context_turned, v_context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, context, inverse, q, k, k_context, cos, sin, context_cos, context_sin, *parameters = (
            ctx.saved_tensors
        )
        weights, eps = AttentionWeights(*parameters), ctx.eps
        residual, dq, dk, dv, dk_context, dv_context = (u.contiguous() for u in upstream)
        norms = weights.q_norm, weights.k_norm
        q_tiles, k_tiles = (head_tiles(*y.shape[:2]) for y in (q, k))
        slot_tiles, context_tiles = q_tiles + k_tiles, head_tiles(*k_context.shape[:2])
        partial = x.new_empty(slot_tiles + context_tiles, q.shape[2], dtype=torch.float32)
        dq, dk = heads_backward(dq, dk, q, k, *norms, Rotary(cos, sin), eps, partial[:slot_tiles])
        none = k_context[:, :0]
        _, dk_context = heads_backward(
            none, dk_context, none, k_context, *norms,
            Rotary(context_cos, context_sin), eps, partial[slot_tiles:],
        )  # fmt: skip
        dq, dk, dv, dk_context, dv_context = (y.flatten(1) for y in (dq, dk, dv, dk_context, dv_context))
        dnormed = torch.mm(dq, weights.q).addmm_(dk, weights.k).addmm_(dv, weights.v)
        dcontext = torch.mm(dk_context, weights.k).addmm_(dv_context, weights.v)
        dx, dnorm, normed = norm_backward(dnormed, x, weights.norm, inverse, residual)
        assert normed is not None
        return (
            dx, dcontext, None, None, None, dnorm,
            torch.mm(dq.t(), normed),
            torch.mm(dk.t(), normed).addmm_(dk_context.t(), context),
            torch.mm(dv.t(), normed).addmm_(dv_context.t(), context),
            partial[:q_tiles].sum(dim=0).to(weights.q_norm.dtype),
            partial[q_tiles:].sum(dim=0).to(weights.k_norm.dtype),
        )  # fmt: skip


class _AfterAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, eps: float, *parameters: Tensor) -> Tensor:
        weights = OutputWeights(*parameters)
        x = torch.addmm(x, attended, weights.o.t())
        normed, inverse = norm_forward(x, weights.norm, eps)
        gate, up = torch.mm(normed, weights.gate.t()), torch.mm(normed, weights.up.t())
        del normed
        out = torch.addmm(x, swiglu_forward(gate, up), weights.down.t())
        ctx.save_for_backward(x, attended, inverse, gate, up, *parameters)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, attended, inverse, gate, up, *parameters = ctx.saved_tensors
        weights, upstream = OutputWeights(*parameters), upstream.contiguous()
        dgate, dup, product = swiglu_backward(torch.mm(upstream, weights.down), gate, up)
        ddown = torch.mm(upstream.t(), product)
        del product
        dnormed = torch.mm(dgate, weights.gate).addmm_(dup, weights.up)
        dx, dnorm, normed = norm_backward(dnormed, x, weights.norm, inverse, upstream)
        assert normed is not None
        return (
            dx, torch.mm(dx, weights.o), None,
            torch.mm(dx.t(), attended), dnorm, torch.mm(dgate.t(), normed), torch.mm(dup.t(), normed), ddown,
        )  # fmt: skip


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Arguments as `api.rms_norm`, x [n, H]."""
    return _Norm.apply(x, weight, eps)


def before_attention_triton(
    x: Tensor,
    context: Tensor,
    weights: AttentionWeights,
    rotary: Rotary,
    context_rotary: Rotary,
    eps: float,
) -> Projected:
    """Arguments as `api.before_attention`."""
    return Projected(
        *_BeforeAttention.apply(x.contiguous(), context.contiguous(), rotary, context_rotary, eps, *weights)
    )


def after_attention_triton(x: Tensor, attended: Tensor, weights: OutputWeights, eps: float) -> Tensor:
    """Arguments as `api.after_attention`."""
    return _AfterAttention.apply(x.contiguous(), attended.flatten(1).contiguous(), eps, *weights)
