"""The backbone of block drafts (DSpark arXiv 2607.05147, DFlash arXiv 2602.06036), as SGLang serves it.

The captured states of each target token are projected once to the *context*, `RMSNorm(fc [K·H -> H])`. Each
Qwen3-style layer updates the block slots only; its keys and values come from the context as it is and from
the normed slots, through the same projections:

    x <- x + o_proj(attention(q(norm x), [kv(context); kv(norm x)]));   x <- x + mlp(norm x)

with an RMS norm a head on queries and keys, then rotary embedding at a token's position in its document.

Notation: T packed tokens, K captured layers, H hidden, M = N·G slots, Hq / Hkv heads of width D.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specforge_kernels.anchored_attention.api import AnchoredLayout, anchored_attention
from specforge_kernels.anchored_attention.reference import attend_reference
from specforge_kernels.draft_layer.api import (
    AttentionWeights,
    OutputWeights,
    Rotary,
    after_attention,
    before_attention,
    keys_values,
    queries,
    rms_norm,
)
from specforge_kernels.policy import choose_attention, choose_layer
from specforge_kernels.warm_up import Launches, WarmUp
from specforge_train.methods.base import DraftModel, DraftShape
from specforge_train.methods.rotary import Turns, turns


@dataclass(frozen=True)
class Geometry:
    """Where context and block slots stand; one for all layers."""

    layout: AnchoredLayout
    context: Rotary
    block: Rotary


class Attention(nn.Module):
    """Parameters of grouped-query attention."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)


class MLP(nn.Module):
    """Parameters of SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)


class Layer(nn.Module):
    """One decoder layer: the unit of sharding, whose parameters are whole while it runs."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.eps = shape.rms_norm_eps
        self.backend: str | None = None
        """Implementation of all but the attention; None leaves it to the policy."""
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Tensor, geometry: Geometry) -> Tensor:
        """[M, H] slots, [T, H] context -> [M, H]."""
        x, q, k, v, k_context, v_context = before_attention(
            x, context, self._weights(), geometry.block, geometry.context, self.eps, backend=self.backend
        )
        return self._finish(x, anchored_attention(q, k_context, v_context, k, v, geometry.layout))

    def keys_values(self, context: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Context [n, H] -> its rotated keys and values, [n, Hkv, D] each, for a drafter's cache."""
        return keys_values(context, self._weights(), rotary, self.eps)

    def update(
        self,
        x: Tensor,
        k_context: Tensor,
        v_context: Tensor,
        rotary: Rotary,
        intervals: tuple[Tensor, Tensor],
    ) -> Tensor:
        """The layer with the context's keys and values at hand, of which slots see the `intervals` (context
        and own, [2, M] each, on the device): nothing here depends on what the host knows.
        """
        weights = self._weights()
        normed = rms_norm(x, weights.norm, self.eps, backend=self.backend)
        q = queries(normed, weights, rotary, self.eps)
        k, v = keys_values(normed, weights, rotary, self.eps)
        attended = attend_reference(q, k_context, v_context, k, v, *intervals, q.shape[-1] ** -0.5)
        return self._finish(x, attended)

    def _weights(self) -> AttentionWeights:
        attention = self.self_attn
        return AttentionWeights(
            self.input_layernorm.weight,
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
            attention.q_norm.weight,
            attention.k_norm.weight,
        )

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        mlp = self.mlp
        weights = OutputWeights(
            self.self_attn.o_proj.weight,
            self.post_attention_layernorm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )
        return after_attention(x, attended, weights, self.eps, backend=self.backend)


class BlockBackbone(DraftModel):
    """Context projection, layers and final norm; methods add their heads and their forward."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(len(shape.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._turns: Turns | None = None
        self._warm_up: WarmUp | None = None

    def project(self, hidden: Tensor) -> Tensor:
        """Captured states [T, K·H] of any float type -> context [T, H] in the type of computation."""
        projected = self.fc(hidden.to(self.fc.weight.dtype))
        return rms_norm(projected, self.hidden_norm.weight, self.shape.rms_norm_eps)

    def finish(self, x: Tensor) -> Tensor:
        """The final norm of the last layer's slots [M, H]."""
        return rms_norm(x, self.norm.weight, self.shape.rms_norm_eps)

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary tables at positions [n] in their documents."""
        if self._turns is None or self._turns.frequency.device != positions.device:
            shape = self.shape
            scaling = shape.config.rope_scaling
            self._turns = turns(shape.head_dim, shape.rope_theta, scaling, positions.device)
        return self._turns.at(positions)

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Slot tokens [M] through the target's embedding [V, H], in the type of computation."""
        return F.embedding(ids, embedding).to(self.fc.weight.dtype)

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> WarmUp:
        """See `DraftModel.warm_up`."""
        if self._warm_up is None:
            # Nowhere else are kernels compiled.
            launches = self.launches(device, dtype) if device.type == "cuda" else ()
            self._warm_up = WarmUp(launches, device)
        return self._warm_up

    def launches(self, device: torch.device, dtype: torch.dtype) -> Launches:
        """Launches of the backbone's Triton kernels; methods add their own."""
        shape, block, found = self.shape, self.shape.config.block_size, []
        group = shape.num_heads // shape.num_kv_heads
        if choose_layer(device, dtype, shape.hidden_size, shape.head_dim).name == "triton":
            from specforge_kernels.draft_layer.triton import warm_up_layer

            found += warm_up_layer(shape.hidden_size, shape.intermediate_size, shape.head_dim, dtype, device)
        if choose_attention(device, dtype, shape.head_dim, group, block).name == "triton":
            from specforge_kernels.anchored_attention.triton import warm_up_attention

            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            found += warm_up_attention(*heads, block, shape.config.sliding_window, dtype, device)
        return found
