"""What tests of the disaggregated flow share: a capture server, faults between it and the producer, and a
whole flow of producer, dispatcher and streams in one process.
"""

import http.client
import json
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import torch.distributed as dist

from specforge_capture.dispatch import Dispatcher
from specforge_capture.ledger import Ledger
from specforge_capture.producer import Produced, Producer
from specforge_capture.prompts.cache import PromptSet, open_or_build
from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.refs import FeatureRef, checksum
from specforge_capture.remote import RemoteStream
from specforge_capture.stores.base import FeatureStore
from specforge_capture.targets.base import PromptRow
from specforge_capture.targets.hf import HFTarget
from specforge_capture.wire import (
    FIELD,
    CaptureRequest,
    ServerDescription,
    answer_json,
    error_json,
)
from specforge_config.data import DataConfig
from specforge_config.features import CaptureSpec, FeatureBatch, StreamStopped
from specforge_config.producer import ConsumerConfig, ProducerConfig

PIECE_ROWS = 4
PATIENT, SECONDS = 30.0, 60.0
QUICK = ProducerConfig(
    in_flight=2, backoff_seconds=0.05, outage_seconds=3, trainer_seconds=3, drain_seconds=PATIENT
)
"""Gives up soon."""
CONSUMER = ConsumerConfig(buffer_bytes=1 << 20, wait_seconds=PATIENT, producer_seconds=2)

Handle = Callable[[str, str, bytes], tuple[int, bytes]]
"""(verb, path, body) -> (status, body) of the answer."""


def wait_until(reached: Callable[[], bool], seconds: float = 30) -> None:
    """Poll until something has happened; fails if it takes longer."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def http_server(handle: Handle, port: int = 0) -> Generator[str]:
    """A server on a port, by default a free one; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_POST = do_GET

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            status, body = handle(self.command, self.path, self.rfile.read(length))
            if status:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def capturing(target: HFTarget, store: FeatureStore) -> Handle:
    """Captures with a target, one request at a time."""
    lock = threading.Lock()

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        if verb == "GET":
            described = ServerDescription.of(target.spec).to_json()
            return 200, json.dumps({FIELD: described}).encode()
        try:
            request = CaptureRequest.from_json(json.loads(body))
        except ValueError as error:
            return 400, json.dumps(error_json(str(error))).encode()
        ids = np.array(request.input_ids, np.int32)
        row = PromptRow(request.sample_id, ids, np.ones(len(ids), bool))
        with lock:
            batch = target.capture([row])
        assert batch.last_hidden is not None
        states = torch.cat([batch.hidden, batch.last_hidden], 1)
        pieces = [piece.contiguous() for piece in states.split(PIECE_ROWS)]
        sums = tuple(checksum(memoryview(p.view(-1).view(torch.uint8).numpy())) for p in pieces)
        ref = FeatureRef(
            key=request.key,
            sample_id=request.sample_id,
            rows=states.shape[0],
            width=states.shape[1],
            dtype=target.spec.dtype,
            piece_rows=PIECE_ROWS,
            checksums=sums,
            spec_hash=request.spec_hash,
        )
        store.put(list(zip(ref.keys, pieces, strict=True)))
        return 200, json.dumps(answer_json(ref)).encode()

    return handle


Fault = Callable[[CaptureRequest, int, bytes], tuple[int, bytes] | None]


def forwarding(upstream: str, fault: Fault) -> Handle:
    """Passes requests on to a server; `fault(request, status, body)` may change a capture's answer."""

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(upstream.removeprefix("http://"), timeout=SECONDS)
        connection.request(verb, path, body)
        response = connection.getresponse()
        status, answer = response.status, response.read()
        connection.close()
        if verb == "GET":
            return status, answer
        return fault(CaptureRequest.from_json(json.loads(body)), status, answer) or (status, answer)

    return handle


@dataclass
class Run:
    """What came of one start."""

    batches: list[list[FeatureBatch]]
    """Of each rank, in the order in which it took them."""
    produced: Produced | None = None
    errors: list[BaseException] = field(default_factory=list)
    """Of the producer first, then of the ranks."""
    told: list[str] = field(default_factory=list)
    """What producer and dispatcher told."""

    def trained(self) -> list[tuple[int, int]]:
        """The task ids of all batches, sorted."""
        return sorted(p for rank in self.batches for batch in rank for p in batch.positions)


def ten_prompts(folder: Path, spec: CaptureSpec, renderer: ChatRenderer) -> PromptSet:
    """Ten samples of 5 to 23 tokens."""
    rows = [{"input_ids": list(range(4 + i, 9 + 3 * i)), "loss_mask": [1] * (5 + 2 * i)} for i in range(10)]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(train=(str(path),), cache_dir=str(folder / "cache"))
    return open_or_build(data, renderer, vocab_size=spec.vocab_size)


def two_rank_plan(prompts: PromptSet) -> PromptPlan:
    """Two epochs of two steps; each rank takes two single samples a step. Two samples an epoch are left."""
    return PromptPlan(
        num_rows=len(prompts),
        fingerprint=prompts.fingerprint,
        seed=0,
        prompt_seed=0,
        epochs=2,
        islands=2,
        tp_size=1,
        batch_size=1,
        accumulation=2,
    )


def objects(folder: Path, key: str = "") -> list[str]:
    """Files of the store in `folder`, of one sample or of all, by piece."""
    names = (path.name for path in (folder / "objects").iterdir() if not path.name.startswith("."))
    return sorted(name for name in names if name.startswith(quote(key, safe="")))


@dataclass
class Flow:
    """A run's parts; `start` runs producer, dispatcher and streams in threads."""

    folder: Path
    store: FeatureStore
    prompts: PromptSet
    plan: PromptPlan
    spec: CaptureSpec
    servers: Sequence[str]
    producer: ProducerConfig = QUICK
    consumer: ConsumerConfig = CONSUMER
    before_step: Callable[[int, Producer], None] = lambda step, producer: None
    """Called on rank 0 before it takes a step's batches."""
    device: str = "cpu"
    peak_bytes: int = 0
    """Most bytes that were staged on a rank."""

    def start(self, *, start_step: int = 0, total_steps: int | None = None, producer: bool = True) -> Run:
        """One start of the run, to its end."""
        total = self.plan.total_steps if total_steps is None else total_steps
        ranks = self.plan.islands * self.plan.tp_size
        run = Run([[] for _ in range(ranks)])
        mail = dist.HashStore()
        source = Producing(self, run) if producer else None
        with ThreadPoolExecutor(ranks + 1) as pool:
            producing = pool.submit(source.run) if source else None
            dispatcher = Dispatcher(
                self.folder,
                self.plan,
                self.spec,
                self.consumer,
                mail,
                start_step=start_step,
                total_steps=total,
                tell=run.told.append,
            )
            together = threading.Barrier(ranks)
            jobs = [
                pool.submit(self._rank, rank, mail, range(start_step, total), together, run, source)
                for rank in range(ranks)
            ]
            failed = [error for job in jobs if (error := job.exception(SECONDS)) is not None]
            dispatcher.close()
            if producing is not None:
                if (error := producing.exception(SECONDS)) is not None:
                    run.errors.append(error)
                else:
                    run.produced = producing.result()
            # A rank that waited for another's gradients has nothing to say of its own.
            run.errors += [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
        return run

    def _rank(
        self,
        rank: int,
        mail: Any,
        steps: range,
        together: threading.Barrier,
        run: Run,
        source: "Producing | None",
    ) -> None:
        stream = RemoteStream(
            self.store,
            self.prompts,
            self.plan,
            self.spec,
            self.consumer,
            mail,
            torch.device(self.device),
            rank=rank,
            start_step=steps.start,
            total_steps=steps.stop,
        )
        try:
            for step in range(steps.start + 1, steps.stop + 1):
                if rank == 0 and source:
                    self.before_step(step, source.producer)
                run.batches[rank] += [next(stream) for _ in range(self.plan.accumulation)]
                together.wait(PATIENT)  # gradients are summed
                stream.acknowledge(step)
        except StreamStopped:
            pass
        except BaseException:
            together.abort()
            raise
        finally:
            self.peak_bytes = max(self.peak_bytes, stream.stats().staged_bytes)
            stream.close()


class Producing:
    """A producer with its ledger, for a thread."""

    def __init__(self, flow: Flow, run: Run) -> None:
        self._ledger = Ledger(flow.folder, flow.plan, flow.spec, "producer")
        parts = flow.store, self._ledger, flow.prompts, flow.plan, flow.spec
        self.producer = Producer(flow.producer, flow.servers, *parts, run.told.append)

    def run(self) -> Produced:
        """Run to the end, then leave the ledger."""
        with closing(self._ledger):
            return self.producer.run()


def require_states(
    run: Run, target: HFTarget, prompts: PromptSet, plan: PromptPlan, device: str = "cpu"
) -> None:
    """Check that each rank's batches follow each other in the plan, with the states that the target gives."""
    for rank, batches in enumerate(run.batches):
        windows = [plan.micro_batches(plan.window(step), rank) for step in range(plan.total_steps)]
        planned = [tasks for window in windows for tasks in window]
        ids = [tuple((task.epoch, task.position) for task in tasks) for tasks in planned]
        start = ids.index(batches[0].positions)
        for batch, tasks in zip(batches, planned[start : start + len(batches)], strict=True):
            assert batch.hidden.device == torch.device(device)
            wanted = target.capture([prompts.row(task.row, (task.epoch, task.position)) for task in tasks])
            assert (batch.positions, batch.sample_ids) == (wanted.positions, wanted.sample_ids)
            for name in ("tokens", "loss_mask", "cu_seqlens"):
                assert torch.equal(getattr(batch, name), getattr(wanted, name))
            # Samples are captured alone here and packed there; sums run in another order.
            for name in ("hidden", "last_hidden"):
                found = getattr(batch, name).cpu()
                torch.testing.assert_close(found, getattr(wanted, name), rtol=1e-4, atol=1e-5)
