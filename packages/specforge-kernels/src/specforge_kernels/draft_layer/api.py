"""A draft's decoder layer around its attention, and the RMS norm, by the kernels that the policy chooses."""

from torch import Tensor

from ..policy import LAYER_BACKENDS, choose_layer
from .reference import (
    AttentionWeights,
    OutputWeights,
    Projected,
    Rotary,
    after_attention_reference,
    before_attention_reference,
    keys_values,
    queries,
    rotate,
)
from .reference import rms_norm as rms_norm_reference

__all__ = [
    "AttentionWeights",
    "OutputWeights",
    "Projected",
    "Rotary",
    "after_attention",
    "before_attention",
    "keys_values",
    "queries",
    "rms_norm",
    "rotate",
]


def before_attention(
    x: Tensor,
    context: Tensor,
    weights: AttentionWeights,
    rotary: Rotary,
    context_rotary: Rotary,
    eps: float,
    *,
    backend: str | None = None,
) -> Projected:
    """Queries, keys and values of a layer, differentiable in x, the context and the weights.

    Args:
        x: [M, H] slots.
        context: [T, H]; keys and values come from it as it is, from the slots after the norm.
        weights: the layer's, in x's type.
        rotary: tables of the M slots.
        context_rotary: tables of the T context tokens.
        eps: of the norms.
        backend: `policy.choose_layer(...).name`; by default chosen from the tensors.

    Raises:
        ValueError: an unknown backend, or tables that are not of these rows.
    """
    for name, rows, tables in (("rotary", x, rotary), ("context_rotary", context, context_rotary)):
        if tables.cos.shape[0] != rows.shape[0] or tables.sin.shape != tables.cos.shape:
            raise ValueError(
                f"{name} must hold a row for each of {rows.shape[0]} positions, found "
                f"{tuple(tables.cos.shape)}"
            )
    if _backend(x, weights.q_norm.numel(), backend) == "triton":
        from .functions import before_attention_triton

        return before_attention_triton(x, context, weights, rotary, context_rotary, eps)
    return before_attention_reference(x, context, weights, rotary, context_rotary, eps)


def after_attention(
    x: Tensor, attended: Tensor, weights: OutputWeights, eps: float, *, backend: str | None = None
) -> Tensor:
    """A layer's output [M, H], differentiable in x, what it attended to and the weights.

    Args:
        x: [M, H] slots before the layer.
        attended: [M, Hq, D].
        weights: the layer's, in x's type.
        eps: of the norm.
        backend: as for `before_attention`.

    Raises:
        ValueError: an unknown backend.
    """
    if _backend(x, attended.shape[2], backend) == "triton":
        from .functions import after_attention_triton

        return after_attention_triton(x, attended, weights, eps)
    return after_attention_reference(x, attended, weights, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """`x` [n, H] normed over its last dimension with `weight` [H], differentiable in both.

    Raises:
        ValueError: an unknown backend.
    """
    if _backend(x, 128, backend) == "triton":
        from .functions import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def _backend(x: Tensor, head_dim: int, backend: str | None) -> str:
    if backend is None:
        return choose_layer(x.device, x.dtype, x.shape[1], head_dim).name
    if backend not in LAYER_BACKENDS:
        raise ValueError(f"unknown layer backend {backend!r}: choose one of {', '.join(LAYER_BACKENDS)}")
    return backend
