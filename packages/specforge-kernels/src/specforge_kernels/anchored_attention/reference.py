"""Anchored attention as a dense masked softmax: the definition that the fast paths are tested against.

    out_m = Σ_n softmax_n(scale · q_m·k_n) v_n    over the keys n that slot m sees (blocks.py), context and
    own block together

Scores and softmax in fp32, or in fp64 for fp64 inputs. Every slot sees at least itself, so no row is empty.
"""

import torch
from torch import Tensor

from .blocks import dense_mask


def joined_keys(context: Tensor, block: Tensor, groups: int = 1) -> Tensor:
    """[T, Hkv, D] and [M, Hkv, D] -> [Hkv · groups, T + M, D], each key head repeated for its `groups` query
    heads.
    """
    return torch.cat([context, block]).transpose(0, 1).repeat_interleave(groups, dim=0)


def attend_reference(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    context: Tensor,
    own: Tensor,
    scale: float,
) -> Tensor:
    """Shapes as `api.anchored_attention`, intervals as `layout`; memory is Hq · M · (T + M) scores."""
    groups = q.shape[1] // k_context.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys = joined_keys(k_context, k_block, groups).to(dtype)
    values = joined_keys(v_context, v_block, groups).to(dtype)
    scores = scale * q.transpose(0, 1).to(dtype) @ keys.transpose(1, 2)
    visible = dense_mask(context, own, k_context.shape[0])
    attention = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (attention @ values).transpose(0, 1).to(q.dtype)
