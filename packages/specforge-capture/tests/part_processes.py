"""The parts of a disaggregated run as real processes, forked from a server that has imported torch once.

Ranks train nothing: they sum a number over gloo, as gradients would be, note what they took, and write the
step down as a checkpoint every other step.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from feature_flow import capturing, http_server, wait_until
from torch.distributed.distributed_c10d import _get_default_store

from specforge_capture.dispatch import Dispatcher
from specforge_capture.producer import run_producer
from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.prompts.samples import PromptReport
from specforge_capture.remote import RemoteStream
from specforge_capture.stores.base import open_store
from specforge_capture.targets.hf import HFTarget
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.producer import ConsumerConfig, ProducerConfig
from specforge_config.store import FileStore, MooncakeStore

_SPAWNER = multiprocessing.get_context("forkserver")
_SPAWNER.set_forkserver_preload(
    ["torch.distributed", "specforge_capture.targets.hf", "specforge_capture.remote"]
)
RANKS = 2


@dataclass(frozen=True)
class Setup:
    """What all parts of a run know."""

    folder: Path
    target: Path
    spec: CaptureSpec
    plan: PromptPlan
    prompts: tuple[Path, PromptReport, str]
    store: MooncakeStore | FileStore
    ports: tuple[int, ...]
    """Of the capture servers."""
    producer: ProducerConfig
    consumer: ConsumerConfig
    step_seconds: float = 0.15
    """How long a step of training lasts."""

    @property
    def servers(self) -> list[str]:
        """Addresses of the capture servers."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def checkpoint(self) -> int:
        """The step to resume from."""
        path = self.folder / "checkpoint"
        return int(path.read_text()) if path.exists() else 0

    def taken(self, rank: int) -> list[dict[str, Any]]:
        """What a rank noted, step by step."""
        path = self.folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def step(self) -> int:
        """The last step that rank 0 did."""
        return max((row["step"] for row in self.taken(0)), default=0)


@dataclass
class Parts:
    """Started processes by name; whatever is left is killed at the end."""

    setup: Setup
    processes: dict[str, BaseProcess] = field(default_factory=dict)

    def start(self, name: str, body: Callable[..., None], *arguments: Any) -> None:
        """Start one part; its output goes to a file of its name."""
        log = str(self.setup.folder / f"{name}.log")
        job = (log, body, self.setup, *arguments)
        self.processes[name] = process = _SPAWNER.Process(target=_run, args=job, daemon=True)
        process.start()

    def start_ranks(self, port: int) -> None:
        """Start both ranks from the checkpoint."""
        for rank in range(RANKS):
            self.start(f"rank-{rank}", train, rank, port)

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self.processes[name]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)

    def wait(self, *names: str, seconds: float = 200) -> list[int | None]:
        """Exit codes; fails the test with the output of all parts if they take longer."""
        deadline = time.monotonic() + seconds
        for name in names:
            self.processes[name].join(max(0.0, deadline - time.monotonic()))
        codes = [self.processes[name].exitcode for name in names]
        assert None not in codes, f"{dict(zip(names, codes, strict=True))}\n{self.output()}"
        return codes

    def wait_for_step(self, step: int) -> None:
        """Wait until rank 0 has done a step; fails if a rank ends before."""

        def reached() -> bool:
            ended = [self.processes[f"rank-{rank}"].exitcode for rank in range(RANKS)]
            assert ended == [None] * RANKS, f"{ended}\n{self.output()}"
            return self.setup.step() >= step

        wait_until(reached, 150)

    def log(self, name: str) -> str:
        """What a part wrote."""
        path = self.setup.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def output(self) -> str:
        """What all parts wrote."""
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.processes)


@contextmanager
def parts_of(setup: Setup) -> Generator[Parts]:
    """Parts that end with the block."""
    setup.folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(setup)
    try:
        yield parts
    finally:
        for process in parts.processes.values():
            process.kill()
            process.join()


def serve(setup: Setup, port: int) -> None:
    """A capture server, until it is killed."""
    torch.set_num_threads(1)
    with (
        closing(open_store(setup.store, contribute=True)) as store,
        http_server(capturing(HFTarget(setup.target, setup.spec), store), port),
    ):
        signal.pause()


def produce(setup: Setup) -> None:
    """The producer."""
    done = run_producer(
        setup.producer,
        setup.servers,
        setup.store,
        PromptSet(*setup.prompts),
        setup.plan,
        setup.spec,
        setup.folder,
    )
    print(done)


def train(setup: Setup, rank: int, port: int) -> None:
    """A rank from the checkpoint to the plan's end."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=150),
    )
    start, total, mail = setup.checkpoint, setup.plan.total_steps, _get_default_store()
    common = setup.plan, setup.spec, setup.consumer, mail
    store = open_store(setup.store, contribute=False)
    dispatcher = None
    if rank == 0:
        dispatcher = Dispatcher(setup.folder, *common, start_step=start, total_steps=total)
    stream = RemoteStream(
        store,
        PromptSet(*setup.prompts),
        *common,
        torch.device("cpu"),
        rank=rank,
        start_step=start,
        total_steps=total,
    )
    notes = setup.folder / f"rank-{rank}.jsonl"
    kept = [row for row in setup.taken(rank) if row["step"] <= start]
    with open(notes, "w", buffering=1) as file:
        for row in kept:
            print(json.dumps(row), file=file)
        for step in range(start + 1, total + 1):
            batches = [next(stream) for _ in range(setup.plan.accumulation)]
            dist.all_reduce(torch.ones(1))
            time.sleep(setup.step_seconds)
            stream.acknowledge(step)
            samples = [[*batch.positions[0], total_of(batch)] for batch in batches]
            print(json.dumps({"step": step, "samples": samples}), file=file)
            if step % 2 == 0:
                dist.barrier()
                if rank == 0:
                    (setup.folder / "checkpoint.new").write_text(str(step))
                    (setup.folder / "checkpoint.new").replace(setup.folder / "checkpoint")
    stream.close()
    if dispatcher:
        dispatcher.close()
    store.close()
    dist.destroy_process_group()


def total_of(batch: FeatureBatch) -> float:
    """Sum of a batch's states."""
    assert batch.last_hidden is not None
    return float(batch.hidden.double().sum() + batch.last_hidden.double().sum())


def _run(log: str, body: Callable[..., None], *arguments: Any) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    try:
        body(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # as a rank that failed does, without waiting for its peers
