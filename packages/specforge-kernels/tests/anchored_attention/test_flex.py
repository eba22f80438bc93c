import pytest
import torch
from torch.nn.functional import pad

from specforge_kernels.anchored_attention.api import anchored_attention, build_layout
from specforge_kernels.anchored_attention.blocks import dense_mask, place_blocks
from specforge_kernels.anchored_attention.flex import TILE, build_block_mask, tile_kinds


def random_layout(seed: int, window: int | None, block: int):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 400, (5,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    anchors = torch.randperm(tokens, generator=generator)[: min(70, tokens)].sort().values
    blocks = place_blocks(offsets, anchors, block, window)
    context, own = (torch.from_numpy(x) for x in (blocks.intervals.context, blocks.intervals.own))
    return blocks, dense_mask(context, own, tokens)


def tiled(visible: torch.Tensor, outside: bool) -> torch.Tensor:
    """[query tiles, key tiles, TILE, TILE], `outside` past the last slot and key."""
    rows, columns = (-n % TILE for n in visible.shape)
    padded = pad(visible, (0, columns, 0, rows), value=outside)
    return padded.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 16, 200])
@pytest.mark.parametrize("block", [7, 16])
def test_tiles_cover_the_mask_and_full_tiles_are_full(window: int | None, block: int) -> None:
    for seed in range(8):
        blocks, visible = random_layout(seed, window, block)
        partial, full = (torch.from_numpy(x) for x in tile_kinds(blocks))
        some = tiled(visible, False).flatten(2).any(-1)
        every = tiled(visible, True).flatten(2).all(-1)
        assert not (partial & full).any()
        assert not (some & ~partial & ~full).any()
        assert not (full & ~every).any()


def test_a_long_shared_context_is_full_tiles() -> None:
    blocks = place_blocks(torch.tensor([0, 1000]), torch.arange(600, 640), 7, None)
    partial, full = tile_kinds(blocks)
    assert full[:, :4].all()  # keys 0 to 511, before every anchor
    assert partial[:, 4].all()
    assert not (partial | full)[:, 5:7].any()  # keys 640 to 895, after every anchor


def test_block_mask_lists_the_tiles_both_ways() -> None:
    blocks, visible = random_layout(3, None, 7)
    mask = build_block_mask(blocks, torch.device("cpu"))
    kinds = tile_kinds(blocks)

    def listed(counts, indices) -> list[list[int]]:
        return [row[:n].tolist() for n, row in zip(counts[0, 0].tolist(), indices[0, 0], strict=True)]

    def expected(kind) -> list[list[int]]:
        return [row.nonzero()[0].tolist() for row in kind]

    partial, full = kinds
    assert listed(mask.kv_num_blocks, mask.kv_indices) == expected(partial)
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == expected(full)
    assert listed(mask.q_num_blocks, mask.q_indices) == expected(partial.T)
    assert listed(mask.full_q_num_blocks, mask.full_q_indices) == expected(full.T)
    slot = torch.arange(visible.shape[0])[:, None]
    key = torch.arange(visible.shape[1])[None]
    assert torch.equal(mask.mask_mod(slot, slot, slot, key), visible)


@pytest.mark.parametrize("window", [None, 9])
def test_values_follow_the_rule(window: int | None, draw_case, attend_by_slot) -> None:
    # On a CPU FlexAttention runs its dense definition, forward only.
    case = draw_case((50, 30), (0, 3, 12, 30, 49, 50, 64, 79), 4, 4, 2, 16, window)
    layout = build_layout(case.offsets, case.anchors, 4, window=window, backend="flex")
    out = anchored_attention(*(x.detach() for x in case.inputs), layout)
    torch.testing.assert_close(out, attend_by_slot(case).detach())
