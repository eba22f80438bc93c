"""Sharded sums against one unsharded float64 model, on real gloo ranks."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from tiny_training import ADAM, CLIP, MICRO_STEPS, WEIGHTS, Layered, inputs, sharded_layered
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from specforge_config.deployment import TrainerNodes
from specforge_config.topology import Topology
from specforge_train.optim import build_adamw, squared_norm, update
from specforge_train.parallel import (
    World,
    compute_dtype,
    full,
    full_state,
    local,
    make_mesh,
    require_equal_replicas,
    set_last_micro_step,
    start_world,
)


def check_sums(tp_size: int) -> None:
    topology = Topology(int(os.environ["WORLD_SIZE"]), tp_size)
    world = start_world(TrainerNodes(device="cpu", cpu_threads=1), topology, "hybrid")
    for sharding in ("hybrid", "full", "grad_op", "no_shard"):
        mesh = make_mesh("cpu", topology.mesh_shape(sharding), timedelta(seconds=30))
        compare_with_float64(replace(world, sharding=sharding, mesh=mesh))
        drift_is_noticed(replace(world, sharding=sharding, mesh=mesh))
    assert world.gather(world.rank) == list(range(world.size))
    with pytest.raises(ValueError, match="nothing there"):
        world.on_main(lambda: [][0] if world.rank else _refuse())
    world.close()


def drift_is_noticed(world: World) -> None:
    """One rank moves one element by the least that float32 knows."""
    model = sharded_layered(world, seed=3)
    require_equal_replicas(model, world)
    name, bias = next(iter(model.named_parameters()))
    if world.rank == world.size - 1 and local(bias).numel():
        element = local(bias.detach()).view(-1)[:1]
        element.copy_(torch.nextafter(element, torch.tensor(1.0)))
    if world.replicas == 1:
        require_equal_replicas(model, world)
        return
    with pytest.raises(RuntimeError, match=rf"the {world.replicas} replicas .* 1 parameters.*{name}"):
        require_equal_replicas(model, world)


def _refuse() -> None:
    raise ValueError("nothing there")


def compare_with_float64(world: World) -> None:
    """Two optimizer steps of two micro-steps on every rank, against one model that sees all of it."""
    model = sharded_layered(world, seed=3)
    torch.manual_seed(3)
    exact = Layered().double()
    optimizer = build_adamw(model, ADAM)
    exact_optimizer = torch.optim.AdamW(exact.parameters(), lr=ADAM.lr, betas=ADAM.betas, weight_decay=0.0)
    for step in range(2):
        for micro in range(MICRO_STEPS):
            set_last_micro_step(model, micro + 1 == MICRO_STEPS, world.sharding)
            model(inputs(step, world.rank, micro)).backward()
            for rank in range(world.size):
                exact(inputs(step, rank, micro).double()).backward()
        for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert p.grad is not None
            assert isinstance(p.grad, DTensor) == (world.shards > 1)
            found = full(p.grad).double()
            torch.testing.assert_close(found, q.grad, rtol=1e-5, atol=1e-5, msg=f"{world.sharding} {name}")
        squared = world.sum_(squared_norm(model) / world.replicas)
        norm = torch.nn.utils.get_total_norm([p.grad for p in exact.parameters() if p.grad is not None])
        torch.testing.assert_close(squared.sqrt(), norm, rtol=1e-6, atol=0)
        update(optimizer, ADAM.lr, CLIP, torch.tensor(WEIGHTS, dtype=torch.float64), squared)
        for parameter in exact.parameters():
            assert parameter.grad is not None
            parameter.grad /= WEIGHTS
        torch.nn.utils.clip_grad_norm_(exact.parameters(), CLIP)
        exact_optimizer.step()
        exact_optimizer.zero_grad()
    for name, value in full_state(model).items():
        torch.testing.assert_close(value.double(), exact.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "tp_size"), [(1, 1), (2, 1), (4, 2)])
def test_sums_norm_and_update_equal_an_unsharded_model(tmp_path: Path, size: int, tp_size: int) -> None:
    run_ranks(check_sums, size, tmp_path, tp_size)


def check_islands_of_32_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=13, world_size=32)
    mesh = make_mesh("cpu", Topology(32, 8).mesh_shape("hybrid"), timedelta(seconds=30))
    groups = {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in ("replica", "shard")}
    assert groups == {"replica": [5, 13, 21, 29], "shard": list(range(8, 16))}
    world = World(13, 5, 32, torch.device("cpu"), "hybrid", mesh)
    model = sharded_layered(world, seed=0)
    assert world.replicas == 4
    assert [local(p).shape[0] for p in model.parameters()] == [0, 0, 0, 0, 0]
    assert [p.shape[0] for p in model.parameters()] == [5, 5, 5, 3, 3]
    dist.destroy_process_group()


def test_an_island_shards_and_islands_replicate(tmp_path: Path) -> None:
    run_ranks(check_islands_of_32_ranks, 1, tmp_path)


def test_a_world_of_other_ranks_than_planned_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"1 ranks were started, required 2: set deployment\.trainer\.nnodes"
    ):
        start_world(TrainerNodes(nproc_per_node=2, device="cpu"), Topology(2), "full")


@pytest.mark.skipif(torch.cuda.device_count() > 3, reason="the machine has as many GPUs")
def test_a_missing_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ValueError, match=r"local rank 3 has no GPU, \d found"):
        start_world(TrainerNodes(device="cuda"), Topology(1), "full")


def test_compute_dtype_follows_the_device() -> None:
    assert compute_dtype("auto", torch.device("cpu")) == torch.float32
    assert compute_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert compute_dtype("float32", torch.device("cuda")) == torch.float32
