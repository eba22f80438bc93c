"""Attention of packed documents, registered with transformers so that no model code changes.

Packed rows of B documents go through the model as one sequence. Invariant: a query sees keys of its own
document only, causally, within the layer's sliding window if it has one. No mask of T x T is ever made:
SDPA runs once a document, or, on CUDA and where that is faster, a variable-length kernel runs all at once.

Without offsets (decoding with a cache) the queries are the last of the keys. With slots, B sequences decode
n tokens each at positions that the device alone knows, over m keys of which each sees its own past.

Notation: n queries, m keys, Hq and Hkv heads, D head width, B sequences that decode at once.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# torch 2.11 takes grouped heads as they are; later versions want to be told of them.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
_VARLEN_BELOW = 1500
"""Mean length of documents below which variable-length attention is faster than SDPA once a document.

Measured on an H200 with a model of Qwen3-0.6B's shape: 2.2 times as fast at 200 tokens, equal at 1700, 0.8
times as fast at 16000.
"""

_CAUSAL = 1
"""The efficient kernel's mask of queries and keys that begin together."""

_Varlen = Callable[[Tensor, Tensor, Tensor, "Documents", float | None, int | None], Tensor]

IMPLEMENTATION = "specforge_packed"
"""Name of the registered attention. It has no mask function, so transformers builds no mask for it."""


@dataclass(frozen=True)
class Documents:
    """Offsets of packed documents, passed to every attention layer of a forward."""

    offsets: tuple[int, ...]
    """[B + 1], from 0 to T."""
    cu_seqlens: Tensor
    """[B + 1] int32, on the states' device."""
    longest: int
    """Tokens of the longest document."""


class Slots:
    """Sequences that decode together, passed to every attention layer of a forward."""

    def __init__(self, positions: Tensor, width: int) -> None:
        """
        Args:
            positions: [B, n] of the new tokens in their sequences.
            width: m, above each of them.
        """
        self._behind = positions[:, :, None] - torch.arange(width, device=positions.device)
        self._seen: dict[tuple[int | None, int], Tensor] = {}

    def seen(self, window: int | None, group: int) -> Tensor:
        """[B, 1, group · n, m] bool: keys that a sequence's new tokens see, for each of `group` heads; made
        once for all layers of a window.
        """
        if (window, group) not in self._seen:
            seen = self._behind >= 0
            if window is not None:
                seen &= self._behind < window
            self._seen[window, group] = seen[:, None].repeat(1, 1, group, 1)
        return self._seen[window, group]


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    slots: Slots | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention.

    Args:
        module: the model's attention layer.
        query: [1, Hq, n, D]; [B, Hq, n, D] with slots.
        key: [1, Hkv, m, D]; [B, Hkv, m, D] with slots.
        value: as `key`.
        attention_mask: always None.
        scaling: factor of the scores.
        sliding_window: keys that a query sees, itself included; None sees all.
        documents: offsets of packed documents; without them or slots, one sequence whose queries are the last
            of the keys.
        slots: places of sequences that decode.
        options: what else the layer passes; anything that changes the result is refused.

    Returns:
        [1, n, Hq, D] (with slots [B, n, Hq, D]), and no weights.

    Raises:
        ValueError: for attention with soft caps, sinks or without causality.
    """
    refused = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if refused or not getattr(module, "is_causal", True):
        raise ValueError(
            f"target.backend hf cannot pack {type(module).__name__} ({', '.join(refused) or 'not causal'}): "
            "set target.backend to sglang"
        )
    if slots is not None:
        return _slots(query, key, value, slots, scaling, sliding_window).transpose(1, 2), None
    if documents is None:
        return _sdpa(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if (varlen := _varlen_for(query, documents, sliding_window)) is not None:
        return varlen(query, key, value, documents, scaling, sliding_window), None
    output = query.new_empty(query.shape)
    for start, stop in zip(documents.offsets[:-1], documents.offsets[1:], strict=True):
        own = slice(start, stop)
        output[:, :, own] = _sdpa(query[:, :, own], key[:, :, own], value[:, :, own], scaling, sliding_window)
    return output.transpose(1, 2), None


def _varlen_for(query: Tensor, documents: Documents, window: int | None) -> _Varlen | None:
    """The variable-length kernel that can run, and is faster or the only one without a mask."""
    if not query.is_cuda:
        return None
    if query.dtype == torch.float32:  # SDPA would hold all scores of its grouped heads
        return _varlen_float32 if window is None or documents.longest <= window else None
    if query.dtype not in (torch.float16, torch.bfloat16):
        return None
    short = documents.offsets[-1] < _VARLEN_BELOW * (len(documents.offsets) - 1)
    return _varlen if short or window is not None else None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, window: int | None
) -> Tensor:
    """Causal attention of all documents at once, 16 bits, [1, T, Hq, D]."""
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    cu, longest = documents.cu_seqlens, documents.longest
    seen = (-1 if window is None else window - 1, 0)
    attend: Any = varlen_attn
    return attend(q, k, v, cu, cu, longest, longest, scale=scale, window_size=seen, **_GROUPED)[None]


def _varlen_float32(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None, window: int | None
) -> Tensor:
    """As `_varlen`, for float32: the kernel that SDPA calls for nested tensors. No window reaches it."""
    group = query.shape[1] // key.shape[1]
    k, v = (states.transpose(1, 2).repeat_interleave(group, dim=2) for states in (key, value))
    cu, longest = documents.cu_seqlens, documents.longest
    attend = torch.ops.aten._efficient_attention_forward
    return attend(query.transpose(1, 2), k, v, None, cu, cu, longest, longest, 0.0, _CAUSAL, scale=scale)[0]


def _slots(
    query: Tensor, key: Tensor, value: Tensor, slots: Slots, scale: float | None, window: int | None
) -> Tensor:
    """Attention of sequences that decode, [B, Hq, n, D]. A group's heads stand as rows over their shared
    keys, which spares the copies that fused kernels with a mask would need for grouped heads.
    """
    sequences, heads, count, width = query.shape
    group = heads // key.shape[1]
    rows, seen = query.reshape(sequences, key.shape[1], group * count, width), slots.seen(window, group)
    if sequences > 1:
        output = scaled_dot_product_attention(rows, key, value, attn_mask=seen, scale=scale)
    else:  # too few rows to fill a device with a fused kernel, which reads all keys one after the other
        scores = (rows * (width**-0.5 if scale is None else scale)) @ key.transpose(-1, -2)
        output = scores.masked_fill_(~seen, float("-inf")).softmax(-1) @ value
    return output.reshape(query.shape)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    """Causal attention of n queries that are the last of m keys, [1, Hq, n, D]."""
    n, m = query.shape[2], key.shape[2]
    mask, causal = None, n == m and n > 1
    if (window is not None and m > window) or 1 < n < m:
        mask = torch.ones(n, m, dtype=torch.bool, device=query.device).tril(m - n)
        if window is not None:
            mask = mask.triu(m - n - window + 1)
        causal = False
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


AttentionInterface.register(IMPLEMENTATION, packed_attention)
