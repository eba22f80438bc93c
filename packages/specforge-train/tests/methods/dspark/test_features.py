import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_drafts import make_batch, make_shape

from specforge_train.methods.dspark import DSpark
from specforge_train.methods.dspark.features import draw_anchors

METHOD = DSpark()


def expected_slots(tokens, mask, anchor, block):
    """(label, teacher, weight is positive) of each slot, from the definition."""
    slots, valid = [], True
    for k in range(block):
        valid = valid and anchor + 1 + k < len(tokens) and bool(mask[anchor + 1 + k])
        slots.append((int(tokens[anchor + 1 + k]), anchor + k, True) if valid else (None, None, False))
    return slots


def test_slots_follow_the_definition() -> None:
    masks = [[1] * 9, [0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1], [1, 1, 0, 1, 1]]
    shape, batch = make_shape(), make_batch(masks)
    inputs = METHOD.prepare(batch, shape, 0)
    anchors, at = inputs.anchors.tolist(), 0
    for index, mask in enumerate(masks):
        start, stop = batch.cu_seqlens[index : index + 2].tolist()
        tokens = batch.tokens[start:stop]
        for p in range(len(mask) - 1):
            if not (mask[p] and mask[p + 1]):
                continue
            assert anchors[at] == start + p
            for k, (label, teacher, counts) in enumerate(expected_slots(tokens, mask, p, 4)):
                m = 4 * at + k
                assert inputs.weights[m].item() == pytest.approx(math.exp(-k / 4) if counts else 0.0)
                assert inputs.ids[m] == (tokens[p] if k == 0 else shape.mask_token_id)
                assert inputs.block_positions[m] == p + k
                if counts:
                    assert inputs.labels[m] == label
                    assert inputs.teacher[m] == start + teacher
                    assert inputs.previous[m] == tokens[p + k]
            at += 1
    assert at == len(anchors)
    assert inputs.context_positions.tolist() == [t for mask in masks for t in range(len(mask))]
    assert inputs.weight_sum == pytest.approx(inputs.weights.double().sum().item())
    by_slot = (inputs.weights.view(-1, 4) > 0).sum(0).tolist()
    assert inputs.counts.tolist() == [*by_slot, len(anchors)]


def test_weights_decay_from_slot_zero() -> None:
    inputs = METHOD.prepare(make_batch([[1] * 6]), make_shape(loss={"decay": 2.0}), 0)
    assert inputs.weights[:4].tolist() == pytest.approx([math.exp(-k / 2) for k in range(4)])


def test_anchors_are_uniform_without_replacement() -> None:
    supervised = np.ones(9, bool)
    drawn = Counter()
    for seed in range(2000):
        anchors = draw_anchors(supervised, 3, (seed, 0, 0)).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        drawn.update(anchors)
    # Each of the 8 candidates is drawn with probability 3/8: 750 times, standard deviation 22.
    assert set(drawn) == set(range(8))
    assert max(abs(count - 750) for count in drawn.values()) < 110


def test_anchors_depend_on_seed_epoch_and_position_only() -> None:
    shape, masks = make_shape(num_anchors=3), [[1] * 30, [1] * 40, [1] * 35]
    batch = make_batch(masks)
    packed = METHOD.prepare(batch, shape, 7)
    for index, mask in enumerate(masks):
        single = replace(make_batch([mask]), positions=(batch.positions[index],))
        start = int(batch.cu_seqlens[index])
        alone = METHOD.prepare(single, shape, 7).anchors + start
        assert torch.equal(alone, packed.anchors[3 * index : 3 * index + 3])
    later = METHOD.prepare(replace(batch, positions=((1, 0), (1, 1), (1, 2))), shape, 7)
    other = METHOD.prepare(batch, shape, 8)
    assert not torch.equal(later.anchors, packed.anchors)
    assert not torch.equal(other.anchors, packed.anchors)


def test_samples_without_anchors_are_dropped_and_counted() -> None:
    batch = make_batch([[0, 1, 0, 1], [1, 1, 1], [1]])
    inputs = METHOD.prepare(batch, make_shape(), 0)
    assert inputs.dropped == 2
    assert inputs.dropped_ids == ("sample-0", "sample-2")
    assert inputs.anchors.tolist() == [4, 5]


def test_samples_without_anchors_are_named_in_the_error() -> None:
    with pytest.raises(ValueError, match=r"sample-0.*training\.unsupervised"):
        METHOD.prepare(make_batch([[0, 1, 0, 1], [1, 1]]), make_shape(), 0, "error")


def test_the_whole_batch_without_anchors_is_one_block_of_no_weight() -> None:
    inputs = METHOD.prepare(make_batch([[0] * 5, [1, 0]]), make_shape(), 0)
    assert inputs.weight_sum == 0.0
    assert inputs.dropped == 2
    assert inputs.weights.tolist() == [0.0] * 4
    assert inputs.counts.tolist() == [0.0] * 5
