import pytest
import torch.distributed as dist

from specforge_capture.sglang.islands import Place, over_islands
from specforge_config.topology import Topology


def test_groups_repeat_over_islands_in_one_order() -> None:
    topology = Topology(world_size=6, tp_size=2)
    assert over_islands([[0, 1]], topology) == [[0, 1], [2, 3], [4, 5]]
    # As SGLang lists pipeline groups: one rank each.
    assert over_islands([[0], [1]], topology) == [[0], [1], [2], [3], [4], [5]]


def test_one_island_changes_nothing() -> None:
    groups = [[0, 2], [1, 3]]
    assert over_islands(groups, Topology(world_size=4, tp_size=4)) == groups


def test_place_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="no process group"):
        Place.of_rank(2, 0)
