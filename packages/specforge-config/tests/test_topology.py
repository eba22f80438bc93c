import pytest

from specforge_config.topology import BatchPlan, Topology, resolve_batches


def test_islands_are_consecutive_ranks() -> None:
    topology = Topology(8, 2)
    assert topology.num_islands == 4
    assert topology.islands == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [topology.island_of(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for island, ranks in enumerate(topology.islands):
        assert [topology.island_of(rank) for rank in ranks] == [(island, i) for i in range(2)]


@pytest.mark.parametrize(
    ("sharding", "shape"), [("no_shard", (8, 1)), ("grad_op", (1, 8)), ("full", (1, 8)), ("hybrid", (2, 4))]
)
def test_meshes_hold_every_rank_once(sharding: str, shape: tuple[int, int]) -> None:
    assert Topology(8, 4).mesh_shape(sharding) == shape


def test_unknown_sharding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.sharding is 'zero3', required one of"):
        Topology(1).mesh_shape("zero3")


@pytest.mark.parametrize(("world", "tp"), [(3, 2), (2, 4), (0, 1), (4, 0)])
def test_a_world_that_is_no_multiple_of_an_island_is_refused(world: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"{world} ranks cannot be cut into islands of engine.tp_size={tp}"):
        Topology(world, tp)


@pytest.mark.parametrize(
    ("world", "batch", "total", "plan"),
    [
        (4, 2, None, BatchPlan(4, 2, 1)),
        (4, None, None, BatchPlan(4, 1, 1)),
        (4, 2, 32, BatchPlan(4, 2, 4)),
        (4, None, 32, BatchPlan(4, 8, 1)),
        (1, 1, 1, BatchPlan(1, 1, 1)),
    ],
)
def test_accumulation_follows_from_the_global_batch(
    world: int, batch: int | None, total: int | None, plan: BatchPlan
) -> None:
    found = resolve_batches(world, batch, total)
    assert found == plan
    assert found.global_batch_size == (total or found.micro_batch)
    assert found.micro_batch * found.accumulation == found.global_batch_size


@pytest.mark.parametrize(
    ("world", "batch", "total", "fault"),
    [
        (4, 1, 6, "training.global_batch_size=6 cannot be shared by 4 ranks"),
        (4, None, 2, "training.global_batch_size=2 cannot be shared by 4 ranks"),
        (2, 3, 8, "training.batch_size=3 does not divide the 4 samples that each of 2 ranks takes"),
        (2, 8, 8, "training.batch_size=8 does not divide the 4 samples"),
    ],
)
def test_batches_that_do_not_divide_are_refused(
    world: int, batch: int | None, total: int, fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        resolve_batches(world, batch, total)
