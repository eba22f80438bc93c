"""The producer: has the prompts of a plan captured, in its order, ahead of the trainer (signatures first)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_config.features import CaptureSpec
from specforge_config.producer import ProducerConfig
from specforge_config.store import FileStore, MooncakeStore


@dataclass(frozen=True)
class Produced:
    """What a producer did."""

    captured: int
    """Samples captured."""
    retried: int
    """Requests that were repeated."""
    stopped: bool
    """Whether it ended on request, before the plan's end."""


def run_producer(
    config: ProducerConfig,
    servers: Sequence[str],
    store: MooncakeStore | FileStore,
    prompts: PromptSet,
    plan: PromptPlan,
    spec: CaptureSpec,
    folder: Path,
    tell: Callable[[str], None] = print,
) -> Produced:
    """The producer's whole life, for its process's main thread: SIGTERM and SIGINT stop it.

    It waits for the trainer's rank 0 to open the ledger in `folder`, captures what the trainer needs, and
    ends once everything is trained and freed. A first signal stops capturing and ends the stream after the
    whole windows that were captured; a second one ends at once. Its objects are freed in any case.

    Args:
        config: `deployment.producer`.
        servers: `http://host:port` of each capture server.
        store: where the servers put features.
        prompts, plan, spec: as the trainer has them.
        folder: the run's folder, on the node of the trainer's rank 0.
        tell: takes lines for the log.

    Raises:
        ValueError: for a server or a ledger of another run, or a prompt that a server refuses.
        RuntimeError: if servers, the store or the trainer are gone for longer than `config` allows, or a
            sample failed all retries. The trainer's ranks get the same message.
    """
    raise NotImplementedError


def sweep(folder: Path, store: MooncakeStore | FileStore) -> int:
    """Free what a run left in a store, where its producer was killed; no trainer or producer may be running.

    Returns:
        How many objects there were.
    """
    raise NotImplementedError
