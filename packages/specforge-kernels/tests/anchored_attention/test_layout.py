import pytest
import torch

from specforge_kernels.anchored_attention.layout import (
    KEY_TILE,
    dense_mask,
    slot_intervals,
    slots_by_key_tile,
)


def intervals(offsets, anchors, block=4, window=None):
    return slot_intervals(torch.tensor(offsets), torch.tensor(anchors), block, window)


def test_context_stops_before_the_anchor_and_starts_with_its_document() -> None:
    found = intervals([0, 5, 12], [0, 3, 5, 9])
    assert found.context[:, ::4].tolist() == [[0, 0, 5, 5], [0, 3, 5, 9]]
    assert found.own[:, 4:8].tolist() == [[4] * 4, [8] * 4]


def test_window_moves_with_the_slot_and_makes_the_block_causal() -> None:
    found = intervals([0, 5, 30], [20], window=6)
    assert found.context.tolist() == [[15, 16, 17, 18], [20] * 4]
    assert found.own.tolist() == [[0] * 4, [1, 2, 3, 4]]
    assert intervals([0, 18, 30], [20], window=6).context[0].tolist() == [18] * 4


@pytest.mark.parametrize("window", [None, 8, 150])
def test_key_tiles_list_every_slot_that_sees_them(window: int | None) -> None:
    torch.manual_seed(0)
    tokens, block = 700, 7
    anchors = torch.randperm(tokens)[:60].sort().values
    found = slot_intervals(torch.tensor([0, 130, 131, 500, tokens]), anchors, block, window)
    seen = dense_mask(*(torch.from_numpy(x) for x in (found.context, found.own)), tokens)[:, :tokens]
    ranges = slots_by_key_tile(found, block, tokens)
    for tile, (first, last) in enumerate(ranges.T):
        who = seen[:, tile * KEY_TILE : (tile + 1) * KEY_TILE].any(1).nonzero().flatten().tolist()
        assert set(who) <= set(range(first, last))
        if who:  # no block at either end that sees nothing of the tile
            assert who[0] // block == first // block
            assert who[-1] // block == last // block - 1


@pytest.mark.parametrize(
    ("offsets", "anchors", "block", "window", "message"),
    [
        ([0, 9], [4, 2], 4, None, "anchors must be sorted"),
        ([0, 9], [9], 4, None, "below 9"),
        ([1, 9], [4], 4, None, "cu_seqlens must rise from 0"),
        ([0, 9], [4], 0, None, "block must be at least 1"),
        ([0, 9], [4], 4, 3, "window must cover the block"),
    ],
)
def test_bad_input_names_what_was_found(offsets, anchors, block, window, message) -> None:
    with pytest.raises(ValueError, match=message):
        intervals(offsets, anchors, block, window)
