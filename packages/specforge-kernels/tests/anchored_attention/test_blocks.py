import pytest
import torch

from specforge_kernels.anchored_attention.blocks import KEY_TILE, Blocks, dense_mask, place_blocks


def blocks(offsets, anchors, size=4, window=None) -> Blocks:
    return place_blocks(torch.tensor(offsets), torch.tensor(anchors), size, window)


def test_context_stops_before_the_anchor_and_starts_with_its_document() -> None:
    found = blocks([0, 5, 12], [0, 3, 5, 9]).intervals
    assert found.context[:, ::4].tolist() == [[0, 0, 5, 5], [0, 3, 5, 9]]
    assert found.own[:, 4:8].tolist() == [[4] * 4, [8] * 4]


def test_window_moves_with_the_slot_and_makes_the_block_causal() -> None:
    found = blocks([0, 5, 30], [20], window=6).intervals
    assert found.context.tolist() == [[15, 16, 17, 18], [20] * 4]
    assert found.own.tolist() == [[0] * 4, [1, 2, 3, 4]]
    assert blocks([0, 18, 30], [20], window=6).intervals.context[0].tolist() == [18] * 4


@pytest.mark.parametrize("window", [None, 8, 150])
def test_key_tiles_list_who_sees_some_and_who_sees_all(window: int | None) -> None:
    torch.manual_seed(0)
    tokens, size = 700, 7
    anchors = torch.randperm(tokens)[:60].sort().values
    found = blocks([0, 130, 131, 500, tokens], anchors.tolist(), size, window)
    context, own = (torch.from_numpy(x) for x in (found.intervals.context, found.intervals.own))
    seen = dense_mask(context, own, tokens)[:, :tokens]
    for tile, (first, full_first, full_last, last) in enumerate(found.slots_by_key_tile().T.tolist()):
        mine = seen[:, tile * KEY_TILE : (tile + 1) * KEY_TILE]
        some = mine.any(1).nonzero().flatten().tolist()
        assert first <= full_first <= full_last <= last
        assert set(some) <= set(range(first, last))
        assert mine[full_first:full_last].all()
        if some:  # no block at either end that sees nothing of the tile
            assert (some[0] // size, some[-1] // size) == (first // size, last // size - 1)
        whole = mine.reshape(-1, size * mine.shape[1]).all(1).sum().item()
        assert full_last - full_first == whole * size or mine.shape[1] < KEY_TILE


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
        blocks(offsets, anchors, block, window)
