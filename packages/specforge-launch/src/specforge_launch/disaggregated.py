"""The disaggregated run's rank: it holds no target; capture servers fill a store, from which it trains.

    prompts -> producer -> capture servers -> store -> rank 0's ledger -> train (draft) -> measure -> export

Its structural peer is `colocated`. Prompts are opened here as well: tokens and masks never travel.
"""

from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from specforge_capture.dispatch import Dispatcher
from specforge_capture.remote import RemoteStream
from specforge_capture.stores.base import open_store
from specforge_capture.targets.base import Extension
from specforge_capture.targets.hf import HFTarget
from specforge_config.run import RunConfig
from specforge_launch.assembly import Prepared, Start, assemble, join, prepare
from specforge_launch.drafts import frozen_of
from specforge_launch.finish import finish
from specforge_launch.resolve import Resolved
from specforge_launch.run_folder import RunFolder
from specforge_launch.target import transformers_target
from specforge_train.checkpoint import Checkpoints
from specforge_train.parallel import World, compute_dtype


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
    start.report({"stage": "join"})
    with startup.part("process group"):
        world, checkpoints = join(prepared)
    # Not a `with`: a rank that fails ends at once, without waiting for peers in an orderly close.
    held = ExitStack()
    with startup.part("store"):
        stream = open_stream(prepared, world, checkpoints, held)
    with startup.part("head"):
        dtype = compute_dtype(config.training.dtype, world.device)
        frozen = frozen_of(prepared.resolved, dtype, world.device)
    target = BorrowedTarget(prepared.resolved, world.device)
    trainer, evaluator = assemble(prepared, stream, target, frozen, world, checkpoints, start)
    finish(trainer, evaluator, world, RunFolder(config.folder), start, trained=held.close)
    held.close()
    world.close()


def open_stream(prepared: Prepared, world: World, checkpoints: Checkpoints, held: ExitStack) -> RemoteStream:
    """This rank's features, and on rank 0 what hands them out; `held` closes both."""
    config, spec, total = prepared.config, prepared.resolved.spec, prepared.total_steps
    deployment, mail = config.disaggregated, _get_default_store()
    store = held.enter_context(closing(open_store(deployment.store, contribute=False)))
    consumer, start = deployment.consumer, checkpoints.step
    if world.main:
        dispatcher = Dispatcher(
            Path(config.folder), prepared.plan, spec, consumer, mail, start_step=start, total_steps=total
        )
        held.enter_context(closing(dispatcher))
    stream = RemoteStream(
        store,
        prepared.prompts,
        prepared.plan,
        spec,
        consumer,
        mail,
        world.device,
        rank=world.rank,
        start_step=start,
        total_steps=total,
    )
    return held.enter_context(closing(stream))


class BorrowedTarget:
    """The target on this rank for as long as prompts are decoded: loaded for each evaluation, then freed.

    Args:
        resolved: the run's facts.
        device: where it decodes.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        self.stop_ids = tuple(resolved.special.stop)
        self._resolved, self._device = resolved, device
        self._target: HFTarget | None = None

    @contextmanager
    def decoding(self) -> Generator[bool]:
        """Hold the target and decode on this rank."""
        with closing(transformers_target(self._resolved, self._device)) as self._target:
            yield True
        self._target = None

    def start(self) -> Any:
        """An empty key-value cache."""
        return self._held.start()

    def extend(self, ids: Tensor, cache: Any) -> Extension:
        """Append `ids` [n] int64 to the sequence in `cache`."""
        return self._held.extend(ids, cache)

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence in `cache`."""
        self._held.crop(cache, length)

    @property
    def _held(self) -> HFTarget:
        assert self._target is not None, "decode inside of decoding()"
        return self._target
