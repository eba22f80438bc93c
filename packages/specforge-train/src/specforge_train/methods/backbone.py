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

from torch import Tensor, nn
from torch.nn import functional as F

from specforge_kernels.anchored_attention.api import AnchoredLayout, anchored_attention
from specforge_train.methods.base import DraftModel, DraftShape
from specforge_train.methods.rotary import Rotary, rotary_at, rotate


@dataclass(frozen=True)
class Geometry:
    """Where context and block slots stand; one for all layers."""

    layout: AnchoredLayout
    context: Rotary
    block: Rotary


class Attention(nn.Module):
    """Grouped-query attention of block slots."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.head_dim)

    def keys_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """[n, H] -> rotated keys and values, [n, Hkv, D] each."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), rotary)
        return keys, self._heads(self.v_proj(x))

    def forward(
        self, x: Tensor, k_context: Tensor, v_context: Tensor, rotary: Rotary, layout: AnchoredLayout
    ) -> Tensor:
        """[M, H] slots over [T, Hkv, D] context keys and values -> [M, H]."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), rotary)
        k, v = self.keys_values(x, rotary)
        return self.o_proj(anchored_attention(q, k_context, v_context, k, v, layout).flatten(1))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[M, H] -> [M, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Tensor, geometry: Geometry) -> Tensor:
        """[M, H] slots, [T, H] context -> [M, H]."""
        k, v = self.self_attn.keys_values(context, geometry.context)
        return self.update(x, k, v, geometry.block, geometry.layout)

    def update(
        self, x: Tensor, k_context: Tensor, v_context: Tensor, rotary: Rotary, layout: AnchoredLayout
    ) -> Tensor:
        """The layer with the context's keys and values at hand, as a drafter's cache has them."""
        x = x + self.self_attn(self.input_layernorm(x), k_context, v_context, rotary, layout)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockBackbone(DraftModel):
    """Context projection, layers and final norm; methods add their heads and their forward."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__(shape)
        self.fc = nn.Linear(len(shape.layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def project(self, hidden: Tensor) -> Tensor:
        """Captured states [T, K·H] of any float type -> context [T, H] in the type of computation."""
        return self.hidden_norm(self.fc(hidden.to(self.fc.weight.dtype)))

    def rotary(self, positions: Tensor) -> Rotary:
        """Rotary tables at positions [n] in their documents."""
        return rotary_at(
            positions, self.shape.head_dim, self.shape.rope_theta, self.shape.config.rope_scaling
        )

    def embed(self, ids: Tensor, embedding: Tensor) -> Tensor:
        """Slot tokens [M] through the target's embedding [V, H], in the type of computation."""
        return F.embedding(ids, embedding).to(self.fc.weight.dtype)
