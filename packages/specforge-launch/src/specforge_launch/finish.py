"""What every run does around its training: measure before, train, measure after, export, sum up."""

import json
import time
from collections.abc import Callable
from typing import Any

from specforge_config.loading import dump_run
from specforge_config.run import RunConfig
from specforge_launch.assembly import Start
from specforge_launch.drafts import check_exported
from specforge_launch.measure import Evaluator, load_counts, number, save_counts
from specforge_launch.run_folder import RunFolder
from specforge_train.counts import DecodeCounts
from specforge_train.export.sglang import export_sglang
from specforge_train.parallel import World, full_state
from specforge_train.trainer import Trainer, TrainSummary


def finish(
    trainer: Trainer,
    evaluator: Evaluator,
    world: World,
    folder: RunFolder,
    start: Start,
    trained: Callable[[], None] = lambda: None,
) -> None:
    """Measure, train, measure again, export and sum up; leave early once a stop is asked for.

    Args:
        trainer: what trains.
        evaluator: what measures its draft.
        world: the ranks.
        folder: the run's folder.
        start: how the run began, and what takes its events.
        trained: called once training has ended, and features are needed no more.
    """
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
    trained()
    if training.stopped:
        return report({"stage": "stopped", "step": training.steps})
    counts = measured("evaluate") if evaluator.prompts else None
    if evaluator.prompts and counts is None:
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
        summary = summarize(resolved.config, training, load_counts(resolved, folder.untrained), counts)
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
