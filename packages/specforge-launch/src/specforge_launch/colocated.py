"""The colocated run: each rank captures with its share of the target, trains its share of the draft.

    prompts -> capture (target) -> train (draft) -> measure (both) -> export

Order matters twice. Prompts are prepared before the process group starts, so that no collective waits for the
one rank that builds the cache. Checkpoints are opened before the stream, which starts at the step they hold.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.sglang.local import SGLangTarget
from specforge_capture.startup import Startup
from specforge_capture.stream import LocalRolloutStream
from specforge_capture.targets.hf import HFTarget
from specforge_config.loading import dump_run
from specforge_config.run import RunConfig
from specforge_launch.drafts import check_exported, frozen_of
from specforge_launch.measure import Evaluator, load_counts, number, save_counts
from specforge_launch.resolve import Resolved, resolve
from specforge_launch.run_folder import RunFolder
from specforge_train.checkpoint import Checkpoints
from specforge_train.decode import DecodeCounts
from specforge_train.export.sglang import export_sglang
from specforge_train.parallel import World, compute_dtype, full_state, start_world
from specforge_train.registry import get_method
from specforge_train.trainer import Trainer, TrainSummary

Report = Callable[[dict[str, Any]], None]


def run(config: RunConfig, started: float) -> None:
    """One rank's whole run.

    Args:
        config: the run.
        started: when the launcher was called, in seconds since the epoch.
    """
    folder, startup = RunFolder(config.folder), Startup()
    startup.seconds["launch"] = time.time() - started
    report = reporter(folder, main=int(os.environ.get("RANK", 0)) == 0)
    report({"stage": "prompts"})
    with startup.part("prompts"):
        resolved = resolve(config)
        prompts = resolved.prompts(
            lambda rows, share: report({"stage": "prompts", "done": round(100 * share), "total": 100})
        )
    plan = PromptPlan.of_run(config, len(prompts), prompts.fingerprint)

    report({"stage": "target"})
    topology = config.topology
    with startup.part("process group"):
        world = start_world(config.deployment.trainer, topology, config.training.sharding)
        checkpoints = Checkpoints(
            folder.path,
            world,
            {**plan.record(), "load_format": config.engine.load_format},
            resolved.spec,
            keep=config.training.keep_checkpoints,
            resume=config.training.resume,
        )
    with startup.part("target"):
        target = start_target(resolved, world.device)
        frozen = frozen_of(resolved, compute_dtype(config.training.dtype, world.device), world.device)
    if isinstance(target, SGLangTarget):
        startup.seconds |= {f"target/{name}": spent for name, spent in target.startup.seconds.items()}
    island, place = topology.island_of(world.rank)
    stream = LocalRolloutStream(target, prompts, plan, island=island, rank=place, start_step=checkpoints.step)
    method = get_method(config.draft.method)
    evaluator = Evaluator.of_run(resolved, target, method, frozen, world)
    start = Start(started, startup, report)
    with startup.part("draft"):
        trainer = Trainer(
            config,
            method,
            method.resolve(config.draft, resolved.target, resolved.mask_token_id),
            frozen,
            stream,
            world,
            checkpoints,
            min(plan.total_steps, config.training.max_steps or plan.total_steps),
            evaluate=evaluator.while_training if evaluator.prompts else None,
            report=start.report,
        )
    finish(trainer, evaluator, world, folder, start)
    world.close()


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


def start_target(resolved: Resolved, device: torch.device) -> HFTarget | SGLangTarget:
    """This rank's share of the target, after the process group has started."""
    config, spec, stop = resolved.config, resolved.spec, resolved.special.stop
    if config.target.backend == "hf":
        return HFTarget(config.target.path, spec, device, stop, config.seed if config.dummy_weights else None)
    return SGLangTarget(config, resolved.target, spec, device, stop)


def finish(trainer: Trainer, evaluator: Evaluator, world: World, folder: RunFolder, start: Start) -> None:
    """Measure, train, measure again, export and sum up; leave early once a stop is asked for."""
    report = start.report

    def measured(stage: str) -> DecodeCounts | None:
        every = evaluator.size
        return evaluator.over_world(
            trainer.draft(),
            world,
            folder.stop,
            lambda d, n: report({"stage": stage, "done": d * every, "total": n * every}),
        )

    resolved = evaluator.resolved
    world.on_main(lambda: accept(resolved.config, folder))
    if trainer.step == 0 and evaluator.prompts:
        with start.startup.part("untrained draft"):
            untrained = measured("untrained")
        if untrained is None:
            return report({"stage": "stopped", "step": 0})
        world.on_main(lambda: save_counts(untrained, resolved, folder.untrained))
    training = trainer.train()
    if training.stopped:
        return report({"stage": "stopped", "step": training.steps})
    trained = measured("evaluate") if evaluator.prompts else None
    if evaluator.prompts and trained is None:
        return report({"stage": "stopped", "step": training.steps})
    # What was learnt from random states is for no server.
    exported = not resolved.config.dummy_weights
    if exported:
        report({"stage": "export"})
    state = full_state(trainer.model) if exported else {}

    def write() -> None:
        if exported:
            export_sglang(state, trainer.shape, folder.export)
            check_exported(resolved, folder.export)
        summary = summarize(resolved.config, training, load_counts(resolved, folder.untrained), trained)
        summary |= {**start.summary(), "seconds": time.time() - start.started}
        folder.summary.write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    world.on_main(write)
    report({"stage": "done", "step": training.steps})


def accept(config: RunConfig, folder: RunFolder) -> None:
    """Note that the folder is now this configuration's: what an earlier one summed up is not its result."""
    folder.summary.unlink(missing_ok=True)
    folder.resolved.write_text(dump_run(config))


def summarize(
    config: RunConfig, training: TrainSummary, untrained: DecodeCounts | None, trained: DecodeCounts | None
) -> dict[str, Any]:
    """The table at the end of a run; `None` where nothing was measured."""
    folder = RunFolder(config.folder)

    def slots(counts: DecodeCounts | None) -> list[float | None] | None:
        return [number(share) for share in counts.accept_by_slot] if counts else None

    return {
        "name": config.name,
        "dummy_weights": config.dummy_weights,
        "tau_untrained": number(untrained.tau) if untrained else None,
        "tau_trained": number(trained.tau) if trained else None,
        "accept_by_slot": slots(trained),
        "accept_by_slot_untrained": slots(untrained),
        "lossless_identical": trained.identical if trained else None,
        "lossless_total": trained.total if trained else None,
        "samples_per_s": training.samples_per_s,
        "share_capture": training.share_capture,
        "share_train": training.share_train,
        "share_bubble": training.share_bubble,
        "steps": training.steps,
        "samples": training.samples,
        "replicas": training.replicas,
        "paths": {
            "checkpoint": str(training.checkpoint),
            **({} if config.dummy_weights else {"exported draft": str(folder.export)}),
            "metrics": str(folder.metrics),
            "summary": str(folder.summary),
            "report": str(folder.report),
        },
    }


def reporter(folder: RunFolder, *, main: bool) -> Report:
    """Appends events to the run's `progress.jsonl`; only rank 0 does."""
    if not main:
        return lambda event: None
    file = folder.progress.open("a", buffering=1)
    return lambda event: print(json.dumps(event), file=file)
