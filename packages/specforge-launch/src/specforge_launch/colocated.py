"""The colocated run: each rank captures with its share of the target, trains its share of the draft.

    prompts -> capture (target) -> train (draft) -> measure (both) -> export

Its structural peer is `disaggregated`, whose ranks hold no target.
"""

import torch

from specforge_capture.sglang.local import SGLangTarget
from specforge_capture.stream import LocalRolloutStream
from specforge_capture.targets.hf import HFTarget
from specforge_config.run import RunConfig
from specforge_launch.assembly import Start, assemble, join, prepare
from specforge_launch.drafts import frozen_of
from specforge_launch.finish import finish
from specforge_launch.resolve import Resolved
from specforge_launch.run_folder import RunFolder
from specforge_launch.target import transformers_target
from specforge_train.parallel import compute_dtype


def run(config: RunConfig, started: float) -> None:
    """One rank's whole run.

    Args:
        config: the run.
        started: when the launcher was called, in seconds since the epoch.
    """
    start = Start.of_rank(config, started)
    startup = start.startup
    with startup.part("prompts"):
        prepared = prepare(config, start.report)
    start.report({"stage": "target"})
    with startup.part("process group"):
        world, checkpoints = join(prepared)
    with startup.part("target"):
        target = start_target(prepared.resolved, world.device)
        dtype = compute_dtype(config.training.dtype, world.device)
        frozen = frozen_of(prepared.resolved, dtype, world.device)
    if isinstance(target, SGLangTarget):
        startup.seconds |= {f"target/{name}": spent for name, spent in target.startup.seconds.items()}
    island, place = config.topology.island_of(world.rank)
    stream = LocalRolloutStream(
        target, prepared.prompts, prepared.plan, island=island, rank=place, start_step=checkpoints.step
    )
    trainer, evaluator = assemble(prepared, stream, target, frozen, world, checkpoints, start)
    finish(trainer, evaluator, world, RunFolder(config.folder), start)
    world.close()


def start_target(resolved: Resolved, device: torch.device) -> HFTarget | SGLangTarget:
    """This rank's share of the target, after the process group has started."""
    config, spec, stop = resolved.config, resolved.spec, resolved.special.stop
    if config.target.backend == "hf":
        return transformers_target(resolved, device)
    return SGLangTarget(config, resolved.target, spec, device, stop)
