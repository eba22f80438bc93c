"""The trainer's ranks: process group, device mesh, sharding.

Invariant: the sharded parameters are the float32 master weights, and a parameter's gradient is the SUM of its
gradients over all ranks and micro-steps, reduced in float32. Whoever divides (by the world's sum of loss
weights) does so after the reduction, so the result does not depend on how samples are spread over ranks.

A mesh is (replica, shard): parameters are cut over `shard` by FSDP and equal over `replica`. With one shard
nothing is cut (`whole`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from specforge_config.deployment import TrainerNodes
from specforge_config.topology import Topology
from specforge_train.methods.base import DraftModel
from specforge_train.whole import WholeCopies

T = TypeVar("T")
_WHOLE = "whole_copies"


@dataclass(frozen=True)
class World:
    """This rank, its device and the mesh of all ranks."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    sharding: str
    mesh: DeviceMesh
    """("shard",) or ("replica", "shard")."""

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which alone writes and prints."""
        return self.rank == 0

    @property
    def replicas(self) -> int:
        """Copies of the draft over which the mesh spreads."""
        return self.mesh.size(0) if self.mesh.ndim == 2 else 1

    @property
    def shards(self) -> int:
        """Ranks that a copy of the draft is cut over."""
        return self.mesh.size(self.mesh.ndim - 1)

    def sum_(self, vector: Tensor) -> Tensor:
        """Sum a tensor on `device` over all ranks, in place; every rank gets bitwise the same result."""
        dist.all_reduce(vector)
        return vector

    def gather(self, value: T) -> list[T]:
        """Every rank's picklable value, by rank, on every rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast(list[T], values)

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its picklable result on every rank.

        Raises:
            ValueError, OSError: what `work` raised, on every rank.
        """
        outcome: list[object] = [None, None]
        if self.main:
            try:
                outcome[0] = work()
            except (ValueError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        result, failure = outcome
        if isinstance(failure, Exception):
            raise failure
        return cast(T, result)

    def close(self) -> None:
        """End the process group after a run that went well; `abort` ends the others."""
        dist.destroy_process_group()


def start_world(trainer: TrainerNodes, topology: Topology, sharding: str) -> World:
    """Join the process group that torchrun's environment describes, or make a world of one rank without it.

    Args:
        trainer: device, time limit of a collective and threads.
        topology: the ranks that the run was planned for.
        sharding: `training.sharding`.

    Raises:
        ValueError: if the started ranks are not those of the plan, or a GPU is asked for and missing.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if size != topology.world_size:
        raise ValueError(
            f"{size} ranks were started, required {topology.world_size}: set deployment.trainer.nnodes and "
            "nproc_per_node"
        )
    device = _device(trainer, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(trainer.threads(on_gpu=device.type == "cuda"))
    timeout = timedelta(seconds=trainer.timeout_seconds)
    # Objects (checkpoint plans, manifests) travel over gloo on the host, tensors over NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    mesh = make_mesh(device.type, topology.mesh_shape(sharding), timeout)
    return World(rank, local_rank, size, device, sharding, mesh)


def _device(trainer: TrainerNodes, local_rank: int) -> torch.device:
    if trainer.device == "cpu" or (trainer.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if local_rank >= found:
        raise ValueError(
            f"local rank {local_rank} has no GPU, {found} found: lower deployment.trainer.nproc_per_node or "
            "set deployment.trainer.device to cpu"
        )
    return torch.device("cuda", local_rank)


def make_mesh(device_type: str, shape: tuple[int, int], timeout: timedelta) -> DeviceMesh:
    """Mesh of the initialised process group's ranks.

    Args:
        device_type: `cpu` or `cuda`.
        shape: (replicas, shards) as `Topology.mesh_shape` gives it; shards are consecutive ranks.
        timeout: limit of a collective in the mesh's own groups.
    """
    world = dist.group.WORLD
    assert world is not None
    if shape[0] == 1:
        return DeviceMesh.from_group(world, device_type, mesh_dim_names=("shard",))
    ranks = torch.arange(shape[0] * shape[1]).view(shape)
    # Groups of our own: those that a mesh makes by itself do not take the world's time limit.
    shards, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)
    replicas, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), timeout=timeout)
    return DeviceMesh.from_group(
        [replicas, shards], device_type, mesh=ranks, mesh_dim_names=("replica", "shard")
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Element type of forward and backward: `training.dtype`, where `auto` is bfloat16 on GPUs and float32 on
    a CPU.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def shard(model: DraftModel, world: World, dtype: torch.dtype) -> DraftModel:
    """Cut a model over the world's mesh: one unit for each of `model.layers`, one for the rest.

    Its forward then computes in `dtype` and its backward leaves summed float32 gradients in the shards. Where
    a rank's shard is all of it, nothing is cut: FSDP would pack and copy as if it were.

    Args:
        model: the draft on the meta device, to be given storage by `to_empty` and values afterwards, so that
            no rank ever holds more than its shard.
        world: where to.
        dtype: element type of the computation.

    Returns:
        `model` itself, now an `FSDPModule` or one with `whole_copies`.
    """
    if world.shards == 1:
        replicas = world.mesh.get_group("replica") if world.replicas > 1 else None
        setattr(model, _WHOLE, WholeCopies(model, model.layers, dtype, replicas))
        return model
    return cut(model, world, dtype)


def cut(model: DraftModel, world: World, dtype: torch.dtype) -> DraftModel:
    """`shard` by FSDP."""
    # Inputs are left alone: they are records whose float32 weights must not be cast to `dtype`.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    reshard = world.sharding in ("full", "hybrid")
    for layer in model.layers:
        fully_shard(layer, mesh=world.mesh, reshard_after_forward=reshard, mp_policy=policy)
    # The root's backward starts right after its forward: gathering it twice would gain nothing.
    fully_shard(model, mesh=world.mesh, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without it a factor of one becomes NCCL's pre-multiplied sum, which gloo lacks.
            module.set_force_sum_reduction_for_comms(True)
    return model


def set_last_micro_step(model: nn.Module, last: bool, sharding: str) -> None:
    """Before a micro-step: reduce gradients only in the last one of the optimizer step, accumulate locally in
    the others.
    """
    if (copies := getattr(model, _WHOLE, None)) is not None:
        copies.last = last
        return
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(last)
    model.set_is_last_backward(last)
    if sharding in ("no_shard", "grad_op"):
        model.set_reshard_after_backward(last)  # parameters stay gathered until they change


def require_equal_replicas(model: nn.Module, world: World) -> None:
    """Check that the draft's replicas hold the same parameters, bit for bit. A collective.

    The first replica sends its shards to the others, a tensor at a time.

    Raises:
        RuntimeError: on every rank, naming parameters that differ.
    """
    if world.replicas == 1:
        return
    group, mine = world.mesh.get_group("replica"), []
    for name, parameter in model.named_parameters():
        bits = local(parameter.detach()).contiguous().view(torch.int32)
        first = bits.clone()
        if first.numel():  # a tensor of few rows may have none for this shard
            dist.broadcast(first, group=group, group_src=0)
        if not torch.equal(first, bits):
            mine.append(name)
    differing = {name for names in world.gather(mine) for name in names}
    if differing:
        raise RuntimeError(
            f"the {world.replicas} replicas of the draft differ in {len(differing)} parameters, such as "
            f"{sorted(differing)[:3]}: a rank computed something else; go on from the last checkpoint"
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank's device. A collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def set_full(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor, which every rank holds, into a parameter, each rank its own part."""
    value = value.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.detach().copy_(value)


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of a sharded model's state on every rank's device, one at a time.

    A collective: call it on all ranks and take all of it.
    """
    for name, value in model.state_dict().items():
        yield name, full(value).detach()


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole float32 state of a sharded model on every rank's device. A collective, like `gathered`."""
    return dict(gathered(model))
