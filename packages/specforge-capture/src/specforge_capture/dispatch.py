"""Rank 0's dispatcher: hands whole optimizer windows from the ledger to ranks (signatures first)."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from specforge_capture.prompts.plan import PromptPlan
from specforge_config.features import CaptureSpec
from specforge_config.producer import ConsumerConfig


class Dispatcher:
    """A thread of rank 0 that gives each rank its refs and writes acknowledgements into the ledger.

    Args:
        folder: the run's folder, where the ledger lies; the producer runs on this node.
        plan: the order of prompts; one island a rank.
        spec: the capture contract.
        config: how long to wait.
        mail: a key-value store that all ranks reach: the process group's own
            (`dist.distributed_c10d._get_default_store()`).
        start_step: the trainer's checkpoint; everything behind it is captured anew.
        total_steps: optimizer steps of the run.
        tell: takes lines for the log (what was rewound, settled or captured anew).

    Raises:
        ValueError: if the ledger is of another run, or another trainer has it open.
    """

    def __init__(
        self,
        folder: Path,
        plan: PromptPlan,
        spec: CaptureSpec,
        config: ConsumerConfig,
        mail: dist.Store,
        *,
        start_step: int = 0,
        total_steps: int,
        tell: Callable[[str], None] = print,
    ) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """After all ranks closed their streams: settle what was captured and not trained, close the ledger's
        session. The producer then frees the rest and ends."""
        raise NotImplementedError
