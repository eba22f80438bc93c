"""Measuring a draft by speculative decoding on held-out prompts, spread over the ranks of a run.

Island i decodes prompts i, i + islands, …; counts are summed over the world before any ratio is formed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_capture.prompts.evaluation import load_eval_prompts
from specforge_capture.targets.base import DecodingTarget
from specforge_launch.resolve import Resolved
from specforge_train.counts import DecodeCounts, Decoded, PlainOutput
from specforge_train.decode import evaluate
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel, Method
from specforge_train.parallel import World

Progress = Callable[[int, int], None]
"""Called with the prompts that this rank has decoded and those it has to."""


class StopRequested(Exception):
    """A stop was asked for while prompts were decoded."""


@dataclass
class Evaluator:
    """Decodes the evaluation prompts of a run with whatever draft it is given."""

    resolved: Resolved
    target: DecodingTarget
    method: Method
    frozen: FrozenTarget
    prompts: list[Tensor]
    """[S] int64 each."""
    island: int = 0
    """Which share of the prompts this rank's island decodes."""
    size: int = 1
    """Islands."""
    own_outputs: dict[tuple[int, ...], PlainOutput] = field(default_factory=dict)
    """Prompt -> the target's own output: it is frozen, one decoding serves all evaluations of a run."""

    @classmethod
    def of_run(
        cls,
        resolved: Resolved,
        target: DecodingTarget,
        method: Method,
        frozen: FrozenTarget,
        world: World,
    ) -> "Evaluator":
        """Read the prompts that `evaluation` names."""
        settings = resolved.config.evaluation
        loaded = load_eval_prompts(settings.prompts, resolved.renderer, settings.max_prompts)
        topology = resolved.config.topology
        island, _ = topology.island_of(world.rank)
        prompts = [prompt.input_ids for prompt in loaded]
        return cls(resolved, target, method, frozen, prompts, island, topology.num_islands)

    def share(
        self,
        draft: DraftModel,
        prompts: Sequence[Tensor],
        on_prompt: Callable[[DecodeCounts, Decoded], None] | None = None,
    ) -> DecodeCounts:
        """Decode the island's share of `prompts`; nothing on ranks that only lend their part of the target.

        A collective of the island. What `on_prompt` raises to end it early, `StopRequested`, is raised again.
        """
        drafter, stopped = self.method.drafter(draft, self.frozen), None
        counts = DecodeCounts.zeros(drafter.block_size)
        with self.target.decoding() as leads:
            try:
                if leads:
                    counts = evaluate(
                        self.target,
                        drafter,
                        prompts[self.island :: self.size],
                        self.resolved.config.evaluation.max_new_tokens,
                        self.resolved.special.stop,
                        on_prompt=on_prompt,
                        own_outputs=self.own_outputs,
                    )
            except StopRequested as request:
                stopped = request  # the island's other ranks are let go before it leaves the block
        if stopped is not None:
            raise stopped
        return counts

    def while_training(self, draft: DraftModel) -> DecodeCounts:
        """This rank's share of the first `evaluation.interval_prompts` prompts."""
        return self.share(draft, self.prompts[: self.resolved.config.evaluation.interval_prompts])

    def over_world(
        self, draft: DraftModel, world: World, stop: Path, progress: Progress = lambda done, total: None
    ) -> DecodeCounts | None:
        """Counts of all prompts over the world; None on every rank once `stop` exists. A collective."""
        own = len(self.prompts[self.island :: self.size])

        def on_prompt(counts: DecodeCounts, decoded: Decoded) -> None:
            progress(counts.total, own)
            if stop.exists():
                raise StopRequested

        progress(0, own)
        counts, stopped = DecodeCounts.zeros(self.method.drafter(draft, self.frozen).block_size), 0.0
        try:
            counts = self.share(draft, self.prompts, on_prompt)
        except StopRequested:
            stopped = 1.0
        vector = torch.cat([counts.to_vector(), torch.tensor([stopped], dtype=torch.float64)]).to(
            world.device
        )
        world.sum_(vector)
        return None if vector[-1] else DecodeCounts.from_vector(vector[:-1].cpu())


def save_counts(counts: DecodeCounts, resolved: Resolved, path: Path) -> None:
    """Keep counts with the settings they were measured under."""
    settings = resolved.config.evaluation.model_dump(mode="json")
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"settings": settings, "counts": asdict(counts)}))
    staged.replace(path)


def load_counts(resolved: Resolved, path: Path) -> DecodeCounts | None:
    """Counts that were kept; None where there are none under the present settings."""
    if not path.is_file():
        return None
    kept = json.loads(path.read_text())
    return (
        DecodeCounts(**kept["counts"])
        if kept["settings"] == resolved.config.evaluation.model_dump(mode="json")
        else None
    )


def number(value: float) -> float | None:
    """A ratio as JSON: none where nothing was counted."""
    return None if isnan(value) else value


def measurement(counts: DecodeCounts) -> dict[str, Any]:
    """Counts as the ratios that people read."""
    return {
        "tau": number(counts.tau),
        "accept_by_slot": [number(share) for share in counts.accept_by_slot],
        "lossless_identical": counts.identical,
        "lossless_total": counts.total,
        "tokens": counts.tokens,
        "rounds": counts.rounds,
        "speedup": number(counts.speedup),
        "seconds_speculative": counts.seconds_speculative,
        "seconds_plain": counts.seconds_plain,
    }
