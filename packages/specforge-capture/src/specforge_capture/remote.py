"""RemoteStream: a rank's features from capture servers, fetched ahead (signatures first)."""

import torch
import torch.distributed as dist

from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.stores.base import FeatureStore
from specforge_capture.stream import StreamStats
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.producer import ConsumerConfig


class RemoteStream:
    """Iterates over the feature batches of one rank, one a micro-step, in the plan's order.

    Args:
        store: where features are fetched (`open_store(config, contribute=False)`); the caller closes it,
            after the stream.
        prompts, plan, spec: as the producer has them.
        config: how far ahead, and how long to wait.
        mail: as rank 0's `Dispatcher` has it.
        device: where states go.
        rank: this rank.
        start_step: optimizer step to start at.
        total_steps: optimizer steps of the run.
    """

    def __init__(
        self,
        store: FeatureStore,
        prompts: PromptSet,
        plan: PromptPlan,
        spec: CaptureSpec,
        config: ConsumerConfig,
        mail: dist.Store,
        device: torch.device,
        *,
        rank: int = 0,
        start_step: int = 0,
        total_steps: int,
    ) -> None:
        raise NotImplementedError

    def __next__(self) -> FeatureBatch:
        """The next batch.

        Raises:
            StopIteration: at the end of the plan.
            StreamStopped: (specforge_config.features) on all ranks before the same step, if the producer was
                stopped; the trainer saves and stops.
            RuntimeError: what ended the producer or the fetching, in its own words.
        """
        raise NotImplementedError

    def acknowledge(self, step: int) -> None:
        """Optimizer step `step` was taken: its features may be freed. Does not block."""
        raise NotImplementedError

    def stats(self) -> StreamStats:
        """What happened since the last call; `capture_seconds` is the time that the trainer waited."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop fetching and give everything back; on every rank, before rank 0 closes its dispatcher."""
        raise NotImplementedError
