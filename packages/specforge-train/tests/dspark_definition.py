"""DSpark written out from its definition, a document, an anchor and a slot at a time, in float64.

Shares no code with the package: the tests compare the two.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specforge_config.draft import DSparkConfig
from specforge_config.features import FeatureBatch
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftShape

Parameters = Mapping[str, Tensor]
Shape = DraftShape[DSparkConfig]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, position: int, shape: Shape) -> Tensor:
    """[heads, D] turned by a position's angles."""
    half, theta = shape.head_dim // 2, shape.rope_theta
    scaling: Any = shape.config.rope_scaling
    angles, factor = [], 1.0
    for i in range(half):
        frequency = theta ** (-i / half)
        if scaling:
            scale, context = scaling["factor"], scaling["original_max_position_embeddings"]
            first, last = (half * math.log(context / (n * 2 * math.pi)) / math.log(theta) for n in (32, 1))
            low, high = max(math.floor(first), 0), min(math.ceil(last), shape.head_dim - 1)
            ramp = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
            frequency, factor = frequency * (1 - ramp + ramp / scale), 0.1 * math.log(scale) + 1
        angles.append(position * frequency)
    turn = factor * torch.exp(1j * torch.tensor(angles, dtype=torch.float64))
    product = torch.complex(x[:, :half], x[:, half:]) * turn
    return torch.cat([product.real, product.imag], dim=1)


def attended(p: Parameters, layer: int, x: Tensor, context: Tensor, shape: Shape) -> Tensor:
    """[G, Hq·D] attention of one block to the context rows before its anchor and to itself."""
    anchor, eps, window = len(context), shape.rms_norm_eps, shape.config.sliding_window

    def heads(rows: Tensor, name: str, norm: str | None, start: int) -> list[Tensor]:
        """Per row [heads, D], normed and turned if there is a norm."""
        split = (rows @ p[f"layers.{layer}.self_attn.{name}.weight"].T).view(len(rows), -1, shape.head_dim)
        if norm is None:
            return list(split)
        weight = p[f"layers.{layer}.self_attn.{norm}.weight"]
        return [turned(rms(row, weight, eps), start + t, shape) for t, row in enumerate(split)]

    rows = torch.cat([context, x])
    keys = torch.stack(heads(rows, "k_proj", "k_norm", 0))
    values = torch.stack(heads(rows, "v_proj", None, 0))
    outputs = []
    for k, q in enumerate(heads(x, "q_proj", "q_norm", anchor)):
        seen = [t for t in range(len(rows)) if window is None or anchor + k - window < t <= anchor + k]
        for head in range(shape.num_heads):
            shared = head * shape.num_kv_heads // shape.num_heads
            scores = keys[seen, shared] @ q[head] / math.sqrt(shape.head_dim)
            outputs.append(scores.softmax(0) @ values[seen, shared])
    return torch.cat(outputs).view(len(x), -1)


def block_states(p: Parameters, shape: Shape, context: Tensor, frozen: FrozenTarget, token: int) -> Tensor:
    """[G, H] states of the block whose anchor's token follows the captured states `context`."""
    eps = shape.rms_norm_eps
    context = rms(context @ p["fc.weight"].T, p["hidden_norm.weight"], eps)
    x = frozen.embedding[[token] + [shape.mask_token_id] * (shape.config.block_size - 1)]
    for layer in range(shape.num_layers):
        w = {name.removeprefix(f"layers.{layer}."): value for name, value in p.items()}
        normed = rms(x, w["input_layernorm.weight"], eps)
        x = x + attended(p, layer, normed, context, shape) @ w["self_attn.o_proj.weight"].T
        normed = rms(x, w["post_attention_layernorm.weight"], eps)
        gated = F.silu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    return rms(x, p["norm.weight"], eps)


def markov_features(p: Parameters, shape: Shape, states: Tensor, previous: list[int]) -> list[Tensor]:
    """[R] of each slot of a block."""
    kind, rank = shape.config.markov.head, shape.config.markov.rank
    state, out = states.new_zeros(rank), []
    for h, token in zip(states, previous, strict=True):
        e = p["markov_head.markov_w1.weight"][token]
        if kind == "gated":
            gate = p["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + p["markov_head.gate_proj.bias"]
            e = gate.sigmoid() * e
        elif kind == "rnn":
            z = p["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
            gate, candidate, output = (z + p["markov_head.joint_proj.bias"]).split(rank)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            e = output.tanh()
        out.append(e)
    return out


def blocks(batch: FeatureBatch) -> Iterator[tuple[int, int, int, int]]:
    """(document's start, document's stop, anchor, valid slots), packed positions, unlimited block."""
    offsets, mask = batch.cu_seqlens.tolist(), batch.loss_mask.tolist()
    for start, stop in pairwise(offsets):
        for anchor in range(start, stop - 1):
            if mask[anchor] and mask[anchor + 1]:
                valid = 0
                while anchor + 1 + valid < stop and mask[anchor + 1 + valid]:
                    valid += 1
                yield start, stop, anchor, valid


def definition(
    p: Parameters, shape: Shape, batch: FeatureBatch, frozen: FrozenTarget
) -> tuple[Tensor, float, float]:
    """(loss numerator, Σ weights, Σ over blocks of the estimated acceptance length)."""
    assert batch.last_hidden is not None
    loss, confidence, block = shape.config.loss, shape.config.confidence, shape.config.block_size
    total, weights, tau = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for start, stop, anchor, valid in blocks(batch):
        tokens = batch.tokens[anchor:stop].tolist() + [0] * block
        states = block_states(p, shape, batch.hidden[start:anchor], frozen, tokens[0])
        features = markov_features(p, shape, states, tokens[:block])
        survival = 1.0
        tau += 1.0
        for k in range(min(valid, block)):
            logits = frozen.head @ states[k] + p["markov_head.markov_w2.weight"] @ features[k]
            teacher = (frozen.head @ batch.last_hidden[anchor + k]).softmax(0)
            l1 = (logits.softmax(0) - teacher).abs().sum()
            acceptance = (1 - l1.detach() / 2).clamp(0, 1)
            term = -loss.ce * logits.log_softmax(0)[tokens[k + 1]] + loss.l1 * l1
            if confidence.enabled:
                e = p["markov_head.markov_w1.weight"][tokens[k]]
                seen = torch.cat([states[k], e]) if confidence.with_markov else states[k]
                c = (p["confidence_head.proj.weight"][0] @ seen + p["confidence_head.proj.bias"][0]).sigmoid()
                term = term - loss.confidence * (acceptance * c.log() + (1 - acceptance) * (1 - c).log())
            total = total + math.exp(-k / loss.decay) * term
            weights += math.exp(-k / loss.decay)
            survival *= acceptance.item()
            tau += survival
    return total, weights, tau
