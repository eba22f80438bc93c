"""Where ranks stand: islands of target tensor parallelism, their replicas, and the shards of the draft.

An *island* is the set of `tp_size` consecutive ranks that hold one copy of the target. Islands are replicas
of each other: they take different prompts. The draft is sharded over all ranks or, with `hybrid`, inside an
island. Pure arithmetic.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks of a run.

    Raises:
        ValueError: if the world is no multiple of `tp_size`.
    """

    world_size: int
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size < 1 or self.world_size % self.tp_size:
            raise ValueError(
                f"{self.world_size} ranks cannot be cut into islands of engine.tp_size={self.tp_size}; "
                "required: a multiple of it as deployment.trainer.nnodes * nproc_per_node"
            )

    @property
    def num_islands(self) -> int:
        """Number of islands, which is the number of copies of the target."""
        return self.world_size // self.tp_size

    @property
    def islands(self) -> list[list[int]]:
        """The global ranks of each island."""
        return [list(range(i * self.tp_size, (i + 1) * self.tp_size)) for i in range(self.num_islands)]

    def island_of(self, rank: int) -> tuple[int, int]:
        """(island, rank inside the island) of a global rank."""
        return divmod(rank, self.tp_size)

    def mesh_shape(self, sharding: str) -> tuple[int, int]:
        """(replicas, shards) of the draft's device mesh under `training.sharding`.

        `no_shard` replicates on every rank, `grad_op` and `full` shard over the world, `hybrid` in islands.

        Raises:
            ValueError: for an unknown sharding.
        """
        shapes = {
            "no_shard": (self.world_size, 1),
            "grad_op": (1, self.world_size),
            "full": (1, self.world_size),
            "hybrid": (self.num_islands, self.tp_size),
        }
        if sharding not in shapes:
            raise ValueError(f"training.sharding is {sharding!r}, required one of {sorted(shapes)}")
        return shapes[sharding]


@dataclass(frozen=True)
class BatchPlan:
    """How many samples a rank, a micro-step and an optimizer step take.

    `global_batch_size = world_size * batch_size * accumulation`.
    """

    world_size: int
    batch_size: int
    accumulation: int

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-step over the whole world."""
        return self.world_size * self.batch_size

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over the whole world."""
        return self.micro_batch * self.accumulation


def resolve_batches(world_size: int, batch_size: int | None, global_batch_size: int | None) -> BatchPlan:
    """Settle batch size a rank and accumulation from whichever of the two sizes is given.

    Args:
        world_size: ranks of the run.
        batch_size: samples a rank takes in a micro-step; None means all of its share at once.
        global_batch_size: samples of an optimizer step; None means one micro-step.

    Raises:
        ValueError: if the sizes do not divide.
    """
    if global_batch_size is None:
        return BatchPlan(world_size, batch_size or 1, 1)
    share, rest = divmod(global_batch_size, world_size)
    if rest or share == 0:
        raise ValueError(
            f"training.global_batch_size={global_batch_size} cannot be shared by {world_size} ranks; "
            "required: a positive multiple of deployment.trainer.nnodes * nproc_per_node"
        )
    size = batch_size or share
    if share % size:
        raise ValueError(
            f"training.batch_size={size} does not divide the {share} samples that each of {world_size} ranks "
            f"takes of training.global_batch_size={global_batch_size}"
        )
    return BatchPlan(world_size, size, share // size)
