"""The Kimi K3 recipe's draft over the ranks of one of its four islands, in turn, on the meta device."""

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from specforge_config.loading import load_run
from specforge_config.target import TargetShape
from specforge_train.parallel import World, local, make_mesh, shard
from specforge_train.registry import get_method

RECIPE = Path(__file__).resolve().parents[5] / "recipes" / "kimi-k3-dspark-colocated-hsdp.yaml"
K3 = TargetShape(7168, 33792, 93, 64, 64, 112, 163840, 262144, 1e-5, 10000.0, "bfloat16", False)
RANKS, NODES = 32, 4


def check_shards_of_all_ranks() -> None:
    config = load_run(RECIPE)
    method = get_method("dspark")
    shape = method.resolve(config.draft, K3, 163824)
    assert config.topology.islands == [list(range(8 * node, 8 * node + 8)) for node in range(NODES)]
    island = config.topology.islands[1]  # the draft's replicas on the other islands are cut alike
    held: list[dict[str, int]] = []
    for rank in island:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        sharding = config.training.sharding
        mesh = make_mesh("cpu", config.topology.mesh_shape(sharding), timedelta(seconds=30))
        node, place = divmod(rank, 8)
        ranks = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("replica", "shard")}
        assert ranks == {"replica": list(range(place, RANKS, 8)), "shard": config.topology.islands[node]}
        with torch.device("meta"):
            model = method.build(shape)
        whole = {name: p.numel() for name, p in model.named_parameters()}
        shard(model, World(rank, place, RANKS, torch.device("cpu"), sharding, mesh), torch.bfloat16)
        held.append({name: local(p).numel() for name, p in model.named_parameters()})
        dist.destroy_process_group()
    assert {name: sum(part[name] for part in held) for name in whole} == whole
    # The sizes of the recipe: layers, projection of five states, Markov and confidence heads.
    layer = 7168 * 64 * 2 * (64 + 16) + 2 * 64 + 3 * 7168 * 14336 + 2 * 7168
    markov, confidence = 2 * 163840 * 256, 7168 + 256 + 1
    assert sum(whole.values()) == 5 * 7168**2 + 2 * 7168 + 5 * layer + markov + confidence


def test_shards_of_an_island_add_up_to_the_whole_draft(tmp_path: Path) -> None:
    run_ranks(check_shards_of_all_ranks, 1, tmp_path)
