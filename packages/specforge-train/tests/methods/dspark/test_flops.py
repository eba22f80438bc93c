"""Each product is counted from a plain enumeration of the visible pairs and from torch's own flop counter."""

import pytest
import torch
from tiny_drafts import make_batch, make_shape
from torch.utils.flop_counter import FlopCounterMode

from specforge_train.methods.dspark import DSpark
from specforge_train.methods.dspark.flops import step_flops, visible_pairs

MASKS = [[0] * 3 + [1] * 9, [1] * 6, [0, 1, 1, 1, 0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 6])
def test_pairs_are_those_that_the_rule_allows(window: int | None) -> None:
    shape = make_shape(num_anchors=4, sliding_window=window)
    inputs = DSpark().prepare(make_batch(MASKS), shape, 0)
    block, expected = inputs.block, 0
    for anchor in inputs.block_positions.view(-1, block)[:, 0].tolist():
        for slot in range(block):
            start = 0 if window is None else max(0, anchor + slot - (window - 1))
            expected += max(0, anchor - start) + (block if window is None else slot + 1)
    assert visible_pairs(inputs) == expected


def test_a_layer_without_attention_costs_what_torch_counts() -> None:
    shape = make_shape(num_anchors=4)
    inputs = DSpark().prepare(make_batch(MASKS), shape, 0)
    slots, hidden = inputs.ids.numel(), shape.hidden_size
    with FlopCounterMode(display=False) as counter:
        x = torch.randn(slots, hidden, requires_grad=True)
        for width in (shape.intermediate_size, shape.intermediate_size):
            (x @ torch.randn(hidden, width, requires_grad=True)).sum().backward()
        y = torch.randn(slots, shape.intermediate_size, requires_grad=True)
        (y @ torch.randn(shape.intermediate_size, hidden, requires_grad=True)).sum().backward()
    wide = make_shape(num_anchors=4, intermediate_size=2 * shape.intermediate_size)
    grown = step_flops(wide, inputs) - step_flops(shape, inputs)
    assert grown == shape.num_layers * counter.get_total_flops()
