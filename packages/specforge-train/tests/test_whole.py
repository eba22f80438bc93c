"""Ranks that hold the whole draft: against FSDP, float64 and sums by hand, on real gloo ranks."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_processes import run_ranks
from tiny_drafts import frozen_target, make_batch, make_shape
from tiny_training import ADAM, CLIP, MICRO_STEPS, WEIGHTS, inputs, layered_weights, sharded_layered
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from specforge_config.deployment import TrainerNodes
from specforge_config.topology import Topology
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel
from specforge_train.methods.dspark import DSpark
from specforge_train.optim import build_adamw, squared_norm, update
from specforge_train.parallel import (
    World,
    cut,
    local,
    set_full,
    set_last_micro_step,
    shard,
    start_world,
)

BF16 = torch.bfloat16
MASKS = [[[0, 0, 1, 1, 1, 1, 1, 1, 1]], [[0, 1]], [[1] * 17], [[1] * 9]]
"""Of micro-steps; the second one has no anchor."""


def two_ranks() -> World:
    world = start_world(TrainerNodes(device="cpu", cpu_threads=1), Topology(2), "no_shard")
    assert (world.shards, world.replicas) == (1, 2)
    return world


def check_whole_copies_equal_fsdp() -> None:
    """Computing in bfloat16, two steps of two micro-steps: gradients and weights bit for bit."""
    world = two_ranks()
    models = [sharded_layered(world, 3, share, BF16) for share in (shard, cut)]
    optimizers = [build_adamw(model, ADAM) for model in models]
    assert isinstance(models[1], FSDPModule)
    assert not isinstance(models[0], FSDPModule)
    for step in range(2):
        for model in models:
            for micro in range(MICRO_STEPS):
                set_last_micro_step(model, micro + 1 == MICRO_STEPS, world.sharding)
                model(inputs(step, world.rank, micro).bfloat16()).backward()
        for (name, have), want in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert have.grad is not None
            assert want.grad is not None
            assert torch.equal(have.grad, local(want.grad)), name
        for model, optimizer in zip(models, optimizers, strict=True):
            squared = world.sum_(squared_norm(model) / world.replicas)
            update(optimizer, ADAM.lr, CLIP, torch.tensor(WEIGHTS, dtype=torch.float64), squared)
    for have, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(have, local(want))
    for model in models:  # weights that are set without a step count at once
        for name, parameter in model.named_parameters():
            set_full(parameter, layered_weights(3)[name])
    assert torch.equal(*(model(inputs(0, 0, 0).bfloat16()) for model in models))
    world.close()


def test_whole_copies_equal_fsdp(tmp_path: Path) -> None:
    run_ranks(check_whole_copies_equal_fsdp, 2, tmp_path)


class Gated(nn.Module):
    """A layer that is used only when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.layers[1](self.layers[0](x)) if both else self.layers[0](x)).sum()


def check_layers_that_only_some_ranks_use() -> None:
    world = two_ranks()
    torch.manual_seed(0)
    model = cast(Any, Gated())
    exact = copy.deepcopy(model).double()
    shard(model, world, torch.float32)
    for micro in range(2):  # rank 1 uses the second layer never, rank 0 in the first micro-step only
        set_last_micro_step(model, micro == 1, world.sharding)
        model(torch.ones(2, 3) + world.rank, micro == 0 and world.rank == 0).backward()
        for rank in range(2):
            exact(torch.ones(2, 3).double() + rank, micro == 0 and rank == 0).backward()
    for have, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(have.grad.double(), want.grad)
    world.close()


def test_sums_are_those_of_all_ranks_where_some_use_fewer_layers(tmp_path: Path) -> None:
    run_ranks(check_layers_that_only_some_ranks_use, 2, tmp_path)


def dspark_loss(model: nn.Module, rank: int, micro: int) -> Tensor:
    """In bfloat16."""
    method, batch, target = DSpark(), make_batch(MASKS[2 * micro + rank]), frozen_target()
    assert batch.last_hidden is not None
    frozen = FrozenTarget(target.embedding.to(BF16), target.head.to(BF16))
    drawn = method.prepare(batch, make_shape(), 0).to(torch.device("cpu"))
    return model(drawn, batch.hidden.to(BF16), batch.last_hidden.to(BF16), frozen).loss


def check_dspark_equals_sums_by_hand() -> None:
    world = two_ranks()
    with torch.device("meta"):
        model = DSpark().build(make_shape())
    shard(model, world, BF16).to_empty(device="cpu")
    model.init_weights(0)
    plain = DSpark().build(make_shape())
    plain.init_weights(0)
    plain.to(BF16)
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for micro in range(MICRO_STEPS):
        set_last_micro_step(model, micro + 1 == MICRO_STEPS, world.sharding)
        dspark_loss(model, world.rank, micro).backward()
    for rank in range(2):
        own = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for micro in range(MICRO_STEPS):
            plain.zero_grad()
            dspark_loss(plain, rank, micro).backward()
            for name, p in plain.named_parameters():
                assert p.grad is not None
                own[name] += p.grad.float()
        for name, gradient in own.items():
            expected[name] += gradient
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name
    world.close()


def test_dspark_gradients_are_those_of_a_plain_model_summed_by_hand(tmp_path: Path) -> None:
    run_ranks(check_dspark_equals_sums_by_hand, 2, tmp_path)


def whole(model: nn.Module, world: World) -> DraftModel:
    return shard(cast(DraftModel, model), world, BF16)


@pytest.mark.parametrize("share", [shard, cut])
def test_a_model_that_was_trained_is_freed(share: Any, world: World) -> None:
    model = share(cast(Any, Gated()), world, BF16)
    set_last_micro_step(model, True, world.sharding)
    model(torch.ones(2, 3).bfloat16(), True).backward()
    parts = [weakref.ref(model), *map(weakref.ref, model.parameters())]
    del model
    gc.collect()
    assert [part() for part in parts] == [None] * len(parts)


def test_nothing_goes_on_after_a_backward_that_failed(world: World) -> None:
    model = whole(Gated(), world)
    cast(Any, model).layers[0].register_full_backward_pre_hook(_fail)
    loss = model(torch.ones(2, 3).bfloat16(), True)
    with pytest.raises(MemoryError):
        loss.backward()
    with pytest.raises(AssertionError, match="a backward failed"):
        model(torch.ones(2, 3).bfloat16(), True)


def _fail(*_: object) -> None:
    raise MemoryError


def test_a_parameter_of_two_modules_is_refused(world: World) -> None:
    model = Gated()
    cast(Any, model).layers[1].weight = cast(Any, model).layers[0].weight
    with pytest.raises(AssertionError, match="a parameter is shared"):
        whole(model, world)(torch.ones(2, 3).bfloat16(), True)


def test_the_first_forward_may_be_an_evaluations(world: World) -> None:
    model = whole(Gated(), world)
    with torch.inference_mode():
        model(torch.ones(2, 3).bfloat16(), True)
    model(torch.ones(2, 3).bfloat16(), True).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
