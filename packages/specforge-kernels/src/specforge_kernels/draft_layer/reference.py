"""A Qwen3-style decoder layer around its attention, in plain torch: the definition of the fused path, and
what runs where that one cannot.

    q = R(norm_q(W_q n)),  k = R(norm_k(W_k n)),  v = W_v n            with n = norm(x)
    y = x + W_o a,  out = y + W_d (silu(W_g m) ⊙ W_u m)                with m = norm(y)

norm is the RMS norm, x_i w_i / sqrt(mean x² + ε) (arXiv 1910.07467), on queries and keys over each head; R
the rotary embedding (arXiv 2104.09864) in the half-split form,

    R(x)_i = x_i cos_i - x_{i+D/2} sin_i,   R(x)_{i+D/2} = x_{i+D/2} cos_i + x_i sin_i

and silu(g) ⊙ u SwiGLU (arXiv 2002.05202).

Notation: M slots, T context tokens, n either of them, H hidden, I intermediate, Hq / Hkv heads of width D.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rotary(NamedTuple):
    """Tables of n positions: `cos` and `sin` [n, D/2] float32."""

    cos: Tensor
    sin: Tensor


class AttentionWeights(NamedTuple):
    """Parameters of a layer before its attention."""

    norm: Tensor
    """[H]."""
    q: Tensor
    """[Hq·D, H]."""
    k: Tensor
    """[Hkv·D, H]."""
    v: Tensor
    """[Hkv·D, H]."""
    q_norm: Tensor
    """[D]."""
    k_norm: Tensor
    """[D]."""


class OutputWeights(NamedTuple):
    """Parameters of a layer after its attention."""

    o: Tensor
    """[H, Hq·D]."""
    norm: Tensor
    """[H]."""
    gate: Tensor
    """[I, H]."""
    up: Tensor
    """[I, H]."""
    down: Tensor
    """[H, I]."""


class Projected(NamedTuple):
    """What a layer's attention reads."""

    x: Tensor
    """[M, H] the layer's input, which goes on around the attention."""
    q: Tensor
    """[M, Hq, D], rotated."""
    k: Tensor
    """[M, Hkv, D] of the slots, rotated."""
    v: Tensor
    """[M, Hkv, D]."""
    k_context: Tensor
    """[T, Hkv, D], rotated."""
    v_context: Tensor
    """[T, Hkv, D]."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` [..., n] normed over its last dimension, `weight` [n]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """`x` [n, heads, D] turned by its n positions' tables, in at least float32; returned in x's type."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def queries(x: Tensor, weights: AttentionWeights, rotary: Rotary, eps: float) -> Tensor:
    """Normed x [n, H] -> rotated queries [n, Hq, D]."""
    heads = F.linear(x, weights.q).unflatten(1, (-1, weights.q_norm.numel()))
    return rotate(rms_norm(heads, weights.q_norm, eps), rotary)


def keys_values(x: Tensor, weights: AttentionWeights, rotary: Rotary, eps: float) -> tuple[Tensor, Tensor]:
    """Normed x or context [n, H] -> rotated keys and values, [n, Hkv, D] each."""
    keys, values = (F.linear(x, w).unflatten(1, (-1, weights.k_norm.numel())) for w in (weights.k, weights.v))
    return rotate(rms_norm(keys, weights.k_norm, eps), rotary), values


def before_attention_reference(
    x: Tensor,
    context: Tensor,
    weights: AttentionWeights,
    rotary: Rotary,
    context_rotary: Rotary,
    eps: float,
) -> Projected:
    """Arguments as `api.before_attention`."""
    normed = rms_norm(x, weights.norm, eps)
    return Projected(
        x,
        queries(normed, weights, rotary, eps),
        *keys_values(normed, weights, rotary, eps),
        *keys_values(context, weights, context_rotary, eps),
    )


def after_attention_reference(x: Tensor, attended: Tensor, weights: OutputWeights, eps: float) -> Tensor:
    """Arguments as `api.after_attention`."""
    x = x + F.linear(attended.flatten(1), weights.o)
    normed = rms_norm(x, weights.norm, eps)
    return x + F.linear(F.silu(F.linear(normed, weights.gate)) * F.linear(normed, weights.up), weights.down)
