"""Which prompt each island takes at each micro-step: one seeded permutation an epoch, cut into aligned
batches.

A plan may group its samples by length: among every so many optimizer steps, samples are sorted by length, cut
into steps, and the steps shuffled. The ranks of a step then have rows of similar lengths, and wait less for
each other.

Positions of epoch e index its permutation. Optimizer step s of the epoch takes positions [s G, (s + 1) G)
with G the global batch; inside it, micro-batches of `islands * tp_size * batch_size` positions follow each
other; inside a micro-batch, island i takes the i-th island batch of `tp_size * batch_size` positions, and
rank r of the island its r-th `batch_size` of them. So an optimizer step sees the same samples whatever the
number of islands and ranks.

Invariant: the plan is a pure function of its fields. It starts at any step without touching earlier epochs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np

from specforge_config.run import RunConfig

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """One sample to capture: its task id (epoch, position) and the row of the prompt set it names."""

    epoch: int
    position: int
    row: int


@dataclass(frozen=True)
class PromptPlan:
    """The order of prompts of a run.

    Raises:
        ValueError: if the prompts fill no optimizer step.
    """

    num_rows: int
    """Rows of the prompt set."""
    fingerprint: str
    """Content hash of the prompt set."""
    seed: int
    """The run's seed; recorded, it does not touch the order."""
    prompt_seed: int
    """Seed of the order."""
    epochs: int
    islands: int
    tp_size: int
    batch_size: int
    """Samples a rank takes in a micro-step."""
    accumulation: int = 1
    """Micro-steps of an optimizer step."""
    group_by_length: int = 0
    """Optimizer steps among which samples are dealt by length; 0 leaves the permutation as it is."""
    lengths: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Tokens of each row, [num_rows], needed for that; the fingerprint tells them."""

    def __post_init__(self) -> None:
        if self.group_by_length and self.lengths is None:
            raise ValueError("a plan that groups by length needs the lengths of its rows")
        if self.num_rows < self.global_batch:
            raise ValueError(
                f"{self.num_rows} usable prompts fill no optimizer step of {self.global_batch} samples: "
                "lower training.global_batch_size or training.batch_size, or add prompts to data.train"
            )

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        num_rows: int,
        fingerprint: str,
        lengths: Callable[[], np.ndarray] | None = None,
    ) -> "PromptPlan":
        """The plan of a run over a prompt set of `num_rows` rows, whose lengths are read only if they are
        needed.
        """
        return cls(
            num_rows=num_rows,
            fingerprint=fingerprint,
            seed=config.seed,
            prompt_seed=config.prompt_seed,
            epochs=config.training.epochs,
            islands=config.topology.num_islands,
            tp_size=config.topology.tp_size,
            batch_size=config.batches.batch_size,
            accumulation=config.batches.accumulation,
            group_by_length=config.data.group_by_length,
            lengths=lengths() if config.data.group_by_length and lengths else None,
        )

    @property
    def island_batch(self) -> int:
        """Samples an island captures in a micro-step."""
        return self.tp_size * self.batch_size

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-step over all islands."""
        return self.islands * self.island_batch

    @property
    def global_batch(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.num_rows // self.global_batch

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.epochs * self.steps_per_epoch

    @property
    def tail(self) -> int:
        """Samples at the end of each epoch's permutation that fill no optimizer step and are left out."""
        return self.num_rows - self.steps_per_epoch * self.global_batch

    def permutation(self, epoch: int) -> np.ndarray:
        """Rows of the prompt set in the order of an epoch, [num_rows] int64."""
        return _order(self, epoch)

    def window(self, step: int) -> tuple[Task, ...]:
        """The samples that the optimizer step after `step` others takes, in the order of their positions."""
        epoch, window = divmod(step, self.steps_per_epoch)
        rows, first = self.permutation(epoch), window * self.global_batch
        return tuple(Task(epoch, p, int(rows[p])) for p in range(first, first + self.global_batch))

    def micro_batches(self, window: Sequence[T], rank: int) -> list[Sequence[T]]:
        """What a rank of the world takes of a window's samples, one batch a micro-step."""
        firsts = range(rank * self.batch_size, self.global_batch, self.micro_batch)
        return [window[first : first + self.batch_size] for first in firsts]

    def island_batches(self, island: int, start_step: int = 0) -> Iterator[tuple[Task, ...]]:
        """The batches of an island, one a micro-step, from optimizer step `start_step` to the end of the last
        epoch.

        Raises:
            ValueError: if there is no such island.
        """
        if not 0 <= island < self.islands:
            raise ValueError(f"island {island} of a plan with {self.islands} islands")
        for step in range(start_step, self.total_steps):
            window = self.window(step)
            for micro in range(self.accumulation):
                first = micro * self.micro_batch + island * self.island_batch
                yield window[first : first + self.island_batch]

    def record(self) -> dict[str, int | str]:
        """What a checkpoint keeps, so that a resume under another plan is refused; plain JSON values."""
        return {
            "seed": self.seed,
            "prompt_seed": self.prompt_seed,
            "epochs": self.epochs,
            "islands": self.islands,
            "tp_size": self.tp_size,
            "batch_size": self.batch_size,
            "accumulation": self.accumulation,
            "group_by_length": self.group_by_length,
            "rows": self.num_rows,
            "fingerprint": self.fingerprint,
        }


@lru_cache(maxsize=2)
def _order(plan: PromptPlan, epoch: int) -> np.ndarray:
    order = _shuffled(plan.num_rows, plan.prompt_seed, epoch)
    if plan.group_by_length:
        assert plan.lengths is not None
        size, places = plan.global_batch, _shuffled(plan.steps_per_epoch, plan.prompt_seed, epoch, 1)
        for first in range(0, plan.steps_per_epoch, plan.group_by_length):
            steps = np.arange(first, min(first + plan.group_by_length, plan.steps_per_epoch))
            group = order[first * size : (steps[-1] + 1) * size]  # a view
            by_length = group[np.argsort(plan.lengths[group], kind="stable")].reshape(-1, size)
            group[:] = by_length[np.argsort(places[steps])].reshape(-1)
    order.flags.writeable = False
    return order


def _shuffled(count: int, *seeds: int) -> np.ndarray:
    """Sort raw 64-bit draws: numpy keeps those stable over its versions, but not `Generator.permutation`."""
    draws = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(count)
    return np.argsort(draws, kind="stable")
