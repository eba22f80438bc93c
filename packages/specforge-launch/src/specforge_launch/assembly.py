"""The parts that a rank's run is put together from, wherever its features come from.

Order matters twice. Prompts are prepared before the process group starts, so that no collective waits for the
one rank that builds the cache. Checkpoints are opened before the stream, which starts at the step they hold.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.startup import Startup
from specforge_capture.targets.base import DecodingTarget
from specforge_config.run import RunConfig
from specforge_launch.measure import Evaluator
from specforge_launch.resolve import Resolved, resolve
from specforge_launch.run_folder import RunFolder
from specforge_train.checkpoint import Checkpoints
from specforge_train.frozen import FrozenTarget
from specforge_train.parallel import World, start_world
from specforge_train.registry import get_method
from specforge_train.trainer import FeatureStream, Trainer

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Prepared:
    """What a run is about: its settled facts, its prompts and their order."""

    resolved: Resolved
    prompts: PromptSet
    plan: PromptPlan

    @property
    def config(self) -> RunConfig:
        """The run."""
        return self.resolved.config

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return min(self.plan.total_steps, self.config.training.max_steps or self.plan.total_steps)


@dataclass
class Start:
    """How long the run took to its first step, told with the first training event."""

    started: float
    """When the launcher was called, in seconds since the epoch."""
    startup: Startup
    """What it took by part; a part of another part has a slash in its name."""
    tell: Report
    first_step_seconds: float | None = None
    """From the call to the end of the first step; None before that, and on other ranks than 0."""

    def report(self, event: dict[str, Any]) -> None:
        """Pass an event on."""
        if event["stage"] == "train" and self.first_step_seconds is None:
            seconds = self.startup.seconds
            self.first_step_seconds = time.time() - self.started
            before = sum(spent for name, spent in seconds.items() if "/" not in name)
            seconds["first step"] = self.first_step_seconds - before
            event = {**event, **self.summary()}
        self.tell(event)

    def summary(self) -> dict[str, Any]:
        """What the run's summary says of its start."""
        return {"first_step_seconds": self.first_step_seconds, "startup_seconds": self.startup.seconds}

    @classmethod
    def of_rank(cls, config: RunConfig, started: float) -> "Start":
        """The start of this process, which a launcher began at `started`; rank 0 tells the run's folder."""
        startup = Startup()
        startup.seconds["launch"] = time.time() - started
        return cls(
            started, startup, reporter(RunFolder(config.folder), main=int(os.environ.get("RANK", 0)) == 0)
        )


def prepare(config: RunConfig, report: Report = lambda event: None) -> Prepared:
    """Settle a run's facts and open its prompts, or build their cache."""
    report({"stage": "prompts"})
    resolved = resolve(config)
    prompts = resolved.prompts(
        lambda rows, share: report({"stage": "prompts", "done": round(100 * share), "total": 100})
    )
    plan = PromptPlan.of_run(config, len(prompts), prompts.fingerprint, prompts.lengths)
    return Prepared(resolved, prompts, plan)


def join(prepared: Prepared) -> tuple[World, Checkpoints]:
    """Join the other ranks, and find where the run stands.

    Raises:
        ValueError: if it stands behind its own end, or its folder holds another run.
    """
    config = prepared.config
    world = start_world(config.deployment.trainer, config.topology, config.training.sharding)
    checkpoints = Checkpoints(
        RunFolder(config.folder).path,
        world,
        {**prepared.plan.record(), "load_format": config.engine.load_format},
        prepared.resolved.spec,
        keep=config.training.keep_checkpoints,
        resume=config.training.resume,
    )
    if checkpoints.step > prepared.total_steps:
        raise ValueError(
            f"{config.folder} holds step {checkpoints.step}, this run ends at step {prepared.total_steps}; "
            "required: another name or output_dir, or more training.max_steps or training.epochs"
        )
    if checkpoints.path and world.main:
        where = f"step {checkpoints.step} of {prepared.total_steps}"
        print(f"going on from {where}: {checkpoints.path}", flush=True)
    return world, checkpoints


def assemble(
    prepared: Prepared,
    stream: FeatureStream,
    target: DecodingTarget,
    frozen: FrozenTarget,
    world: World,
    checkpoints: Checkpoints,
    start: Start,
) -> tuple[Trainer, Evaluator]:
    """The trainer on `stream`, and what measures its draft with `target`."""
    config, resolved = prepared.config, prepared.resolved
    method = get_method(config.draft.method)
    evaluator = Evaluator.of_run(resolved, target, method, frozen, world)
    with start.startup.part("draft"):
        trainer = Trainer(
            config,
            method,
            method.resolve(config.draft, resolved.target, resolved.mask_token_id),
            frozen,
            stream,
            world,
            checkpoints,
            prepared.total_steps,
            evaluate=evaluator.while_training if evaluator.prompts else None,
            report=start.report,
        )
    return trainer, evaluator


def reporter(folder: RunFolder, *, main: bool) -> Report:
    """Appends events to the run's `progress.jsonl`; only rank 0 does."""
    if not main:
        return lambda event: None
    file = folder.progress.open("a", buffering=1)
    return lambda event: print(json.dumps(event), file=file)
