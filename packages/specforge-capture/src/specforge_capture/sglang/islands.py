"""The virtual world: SGLang builds its process groups for one island while every rank creates those of all
islands.

SGLang takes the whole world for its own: it asserts that the world has tp_size ranks and lists its groups'
ranks from 0. The trainer's world has `islands * tp_size` ranks and its default group is initialised already.
So while SGLang builds its groups, and only then, (1) the world's size is answered as tp_size, and (2) each
list of groups is repeated, shifted by tp_size, for every island.

Invariant: all ranks create all groups in one order, as torch.distributed requires; each keeps its own
island's. Afterwards the default group is as it was, and the trainer goes on using it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from specforge_config.topology import Topology


@dataclass(frozen=True)
class Place:
    """Where this rank stands."""

    topology: Topology
    island: int
    tp_rank: int
    """Rank inside the island."""
    gpu_id: int
    """Index of the rank's device on its node."""

    @classmethod
    def of_rank(cls, tp_size: int, gpu_id: int) -> "Place":
        """The place of this rank in the initialised default process group.

        Raises:
            ValueError: if there is no process group, or it cannot be cut into islands.
        """
        if not dist.is_initialized():
            raise ValueError(
                "target.backend sglang: no process group; required: one that is initialised before the "
                "target, as SGLang otherwise makes its own"
            )
        topology = Topology(dist.get_world_size(), tp_size)
        return cls(topology, *topology.island_of(dist.get_rank()), gpu_id)


def over_islands(group_ranks: list[list[int]], topology: Topology) -> list[list[int]]:
    """Groups of the first island's ranks -> the same groups of every island, by island."""
    return [[rank + island[0] for rank in group] for island in topology.islands for group in group_ranks]


@contextmanager
def virtual_world(topology: Topology) -> Generator[None]:
    """While it lasts, SGLang's groups are built over islands.

    SGLang may be imported already, but must have built no group: one engine lives in a process.
    """
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    build, world_size = GroupCoordinator.__init__, dist.get_world_size

    def build_for_all(self: Any, group_ranks: list[list[int]], *args: Any, **options: Any) -> None:
        # Its broadcaster of requests holds shared memory that nothing frees; nothing here sends requests.
        options["use_message_queue_broadcaster"] = False
        build(self, over_islands(group_ranks, topology), *args, **options)

    def island_size(group: dist.ProcessGroup | None = None) -> int:
        return topology.tp_size if group is None else world_size(group)

    GroupCoordinator.__init__ = build_for_all
    dist.get_world_size = island_size  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        GroupCoordinator.__init__ = build
        dist.get_world_size = world_size
