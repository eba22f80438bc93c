"""Packed cases of anchored attention, and its rule written slot by slot in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """Inputs of `anchored_attention`, and what they were drawn for."""

    offsets: Tensor
    anchors: Tensor
    block: int
    window: int | None
    inputs: tuple[Tensor, ...]


def draw(lengths, anchors, block, heads, key_heads, dim, window, dtype=torch.float64, device="cpu") -> Case:
    """Random queries, keys and values for documents of `lengths` with anchors at packed positions."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    slots, tokens = len(anchors) * block, int(offsets[-1])
    rows = ((slots, heads), (tokens, key_heads), (tokens, key_heads), (slots, key_heads), (slots, key_heads))
    inputs = tuple(torch.randn(*r, dim).to(device, dtype).requires_grad_() for r in rows)
    return Case(offsets, torch.tensor(anchors), block, window, inputs)


def seen_keys(case: Case) -> Tensor:
    """[M, T + M] bool, the rule written out for each slot."""
    offsets, tokens = case.offsets.tolist(), int(case.offsets[-1])
    rows = []
    for j, anchor in enumerate(case.anchors.tolist()):
        document = max(x for x in offsets[:-1] if x <= anchor)
        for k in range(case.block):
            first = document if case.window is None else max(document, anchor + k - (case.window - 1))
            last = case.block if case.window is None else k + 1
            own = [tokens + j * case.block + i for i in range(last)]
            row = torch.zeros(tokens + len(case.anchors) * case.block, dtype=torch.bool)
            row[[*range(first, anchor), *own]] = True
            rows.append(row)
    return torch.stack(rows)


def by_slot(case: Case) -> Tensor:
    """The rule, slot by slot, in a dense softmax in float64."""
    q, k_context, v_context, k_block, v_block = (x.double() for x in case.inputs)
    groups = q.shape[1] // k_context.shape[1]
    keys = torch.cat([k_context, k_block]).repeat_interleave(groups, 1)
    values = torch.cat([v_context, v_block]).repeat_interleave(groups, 1)
    scores = torch.einsum("mhd,nhd->hmn", q, keys) * q.shape[2] ** -0.5
    attention = scores.masked_fill(~seen_keys(case).to(q.device), float("-inf")).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", attention, values)


@pytest.fixture
def draw_case() -> Callable[..., Case]:
    return draw


@pytest.fixture
def attend_by_slot() -> Callable[[Case], Tensor]:
    return by_slot
