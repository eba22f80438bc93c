"""Attention of draft blocks: to their document's context strictly before the anchor, and to their own block.

`build_layout` is called once a step from host tensors, `anchored_attention` once a layer.
"""

import torch
from torch import Tensor

from ..policy import ATTENTION_BACKENDS, choose_attention
from .blocks import place_blocks
from .flex import attend_flex
from .layout import AnchoredLayout, place_layout
from .reference import attend_reference
from .sdpa import attend_sdpa

__all__ = ["AnchoredLayout", "anchored_attention", "build_layout"]


def build_layout(
    cu_seqlens: Tensor,
    anchors: Tensor,
    block: int,
    *,
    window: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
) -> AnchoredLayout:
    """Which keys each of the `M = N·G` query slots sees; see blocks.py for the rule.

    Args:
        cu_seqlens: [B+1] int64 on the host: document offsets, from 0 to T.
        anchors: [N] int64 on the host: packed positions of the anchor tokens, sorted.
        block: G, slots of a block.
        window: tokens a slot sees, itself included (context from `p + k - (window - 1)`, block causal); None:
            all of them, block both ways.
        device: where queries and keys live; default the CPU.
        backend: `policy.choose_attention(...).name`; by default chosen from the tensors.

    Raises:
        ValueError: unsorted or out-of-range offsets or anchors, a window under the block, or an unknown
        backend.
    """
    if backend is not None and backend not in ATTENTION_BACKENDS:
        raise ValueError(
            f"unknown attention backend {backend!r}: choose one of {', '.join(ATTENTION_BACKENDS)}"
        )
    blocks = place_blocks(cu_seqlens, anchors, block, window)
    return place_layout(blocks, torch.device(device or "cpu"), backend)


def anchored_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: AnchoredLayout,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention output [M, Hq, D] of the block slots, differentiable in all five tensors.

    Args:
        q: [M, Hq, D] queries of the block slots, rotated.
        k_context, v_context: [T, Hkv, D] keys and values of the packed context; Hkv divides Hq.
        k_block, v_block: [M, Hkv, D] keys and values of the block slots.
        layout: from `build_layout` with the same T, M and device.
        scale: of the scores; default D^-1/2.

    Raises:
        ValueError: shapes that disagree with each other or with the layout.
    """
    slots, heads, dim = q.shape
    key_heads = k_context.shape[1]
    if slots != layout.slots or k_context.shape[0] != layout.tokens:
        raise ValueError(
            f"the layout is for {layout.slots} slots over {layout.tokens} tokens, "
            f"found {slots} over {k_context.shape[0]}"
        )
    if (
        v_context.shape != k_context.shape
        or k_block.shape != (slots, key_heads, dim)
        or v_block.shape != k_block.shape
    ):
        raise ValueError(
            f"keys and values disagree: context {tuple(k_context.shape)} and {tuple(v_context.shape)}, "
            f"block {tuple(k_block.shape)} and {tuple(v_block.shape)}, queries {tuple(q.shape)}"
        )
    if heads % key_heads:
        raise ValueError(f"{heads} query heads are not a multiple of {key_heads} key heads")
    if slots == 0:
        return q
    scale = dim**-0.5 if scale is None else scale
    inputs = (q, k_context, v_context, k_block, v_block)
    backend = (
        layout.backend
        or choose_attention(q.device, q.dtype, dim, heads // key_heads, layout.blocks.size).name
    )
    if backend == "triton":
        from .triton import attend_triton

        return attend_triton(*inputs, layout, scale)
    if backend == "flex":
        return attend_flex(*inputs, layout.block_mask, scale)
    if backend == "flex-flash":
        return attend_flex(*inputs, layout.block_mask, scale, "FLASH")
    if backend == "sdpa":
        return attend_sdpa(*inputs, layout.tiles, scale)
    return attend_reference(*inputs, *layout.intervals, scale)
