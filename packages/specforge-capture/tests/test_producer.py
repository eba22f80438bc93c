"""Faults between the producer and its servers, in whole flows; and how a producer ends."""

import json
import math
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from feature_flow import (
    QUICK,
    SECONDS,
    Fault,
    Flow,
    Run,
    capturing,
    forwarding,
    http_server,
    objects,
    require_states,
    wait_until,
)

from specforge_capture.ledger import Ledger
from specforge_capture.producer import Produced, Producer, sweep
from specforge_capture.reference_server import ReferenceServer
from specforge_capture.stores.base import FeatureStore, StoreError, open_store
from specforge_capture.targets.hf import HFTarget
from specforge_capture.wire import FIELD, CaptureRequest, error_json
from specforge_config.features import CaptureSpec
from specforge_config.store import FileStore

ALL = [(epoch, position) for epoch in range(2) for position in range(8)]


def start_with(fault: Fault, flow: Flow, **config: Any) -> Run:
    """A run whose answers pass through `fault`."""
    with http_server(forwarding(flow.servers[0], fault)) as url:
        return replace(flow, servers=[url], producer=QUICK.model_copy(update=config)).start()


def first(request: CaptureRequest) -> bool:
    return request.key.endswith("-1")


def ended_at(flow: Flow) -> int | None:
    """The step after which the ledger says that features end."""
    with closing(sqlite3.connect(flow.folder / "ledger.sqlite")) as db:
        return db.execute("SELECT ended FROM run").fetchone()[0]


@contextmanager
def limited(flow: Flow, target: HFTarget, folder: Path, capacity: int) -> Generator[str]:
    """A server whose view of the flow's store has a limit; what does not fit fails that request."""
    settings = FileStore(kind="files", folder=str(folder / "objects"), capacity_bytes=capacity)
    with closing(open_store(settings, contribute=False)) as store:
        handle = capturing(target, store)

        def guarded(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
            try:
                return handle(verb, path, body)
            except StoreError as error:
                return 500, json.dumps(error_json(str(error))).encode()

        with http_server(guarded) as url:
            yield url


def changed(body: bytes, **fields: Any) -> tuple[int, bytes]:
    answer = json.loads(body)
    answer["meta_info"][FIELD][0] |= fields
    return 200, json.dumps(answer).encode()


def short(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
    rows = len(request.input_ids)
    return changed(body, rows=rows - 1, piece_rows=rows, checksums=[0]) if first(request) else None


def narrow(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
    return changed(body, width=32) if first(request) else None


def of_another_sample(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
    return changed(body, sample_id="other") if first(request) else None


def empty(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
    return (200, json.dumps({"meta_info": {}}).encode()) if first(request) else None


def failing(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
    return (500, json.dumps(error_json("out of memory")).encode()) if first(request) else None


@pytest.mark.parametrize("fault", [short, narrow, of_another_sample, empty, failing])
def test_a_wrong_answer_is_rejected_and_asked_for_again(
    fault: Fault, flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    run = start_with(fault, flow)
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert run.produced is not None
    assert run.produced.retried == len(ALL)
    assert objects(tmp_path) == []


def test_the_objects_of_a_rejected_answer_are_freed_at_once(flow: Flow, tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}

    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
        if not first(request):
            seen[request.key] = objects(tmp_path, request.key.rpartition("-")[0] + "-1/")
        return short(request, status, body)

    run = start_with(fault, flow)
    assert run.errors == []
    assert len(seen) == len(ALL)
    assert all(left == [] for left in seen.values())


def test_a_sample_that_fails_each_time_ends_the_run_naming_it(flow: Flow, tmp_path: Path) -> None:
    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
        return (500, json.dumps(error_json("bad kernel")).encode()) if ":7" in request.sample_id else None

    run = start_with(fault, flow, retries=1)
    assert isinstance(run.errors[0], RuntimeError)
    assert len(run.errors) >= 2
    for error in run.errors:
        assert "prompts.jsonl:7 (epoch 0, position" in str(error)
        assert "could not be captured in 2 attempts" in str(error)
        assert "bad kernel" in str(error)
    assert objects(tmp_path) == []


def test_a_refused_sample_ends_the_run_at_once_naming_it(flow: Flow, tmp_path: Path) -> None:
    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
        return (400, json.dumps(error_json("too long")).encode()) if ":7" in request.sample_id else None

    run = start_with(fault, flow)
    assert isinstance(run.errors[0], ValueError)
    assert len(run.errors) >= 2
    for error in run.errors:
        assert "prompts.jsonl:7 (epoch 0, position" in str(error)
        assert "was refused: " in str(error)
        assert "too long" in str(error)
    assert run.produced is None
    assert objects(tmp_path) == []


def test_a_late_second_answer_is_freed_and_never_trained(
    flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    """The first request of a sample times out; its server goes on and stores what nobody waits for."""

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        if first(request) and ":7" in request.sample_id:
            time.sleep(1.0)

    run = start_with(fault, flow, request_timeout_seconds=0.5)
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert objects(tmp_path) == []


def test_a_server_of_another_contract_gets_no_sample(
    flow: Flow, target: HFTarget, store: FeatureStore, tmp_path: Path
) -> None:
    asked = []

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        asked.append(verb)
        return capturing(target, store)(verb, path, body)

    other = flow.spec.model_copy(update={"layer_ids": (0, 1, 3)})
    with http_server(handle) as url:
        run = replace(flow, spec=other, servers=[url]).start()
    assert "layer_ids is (0, 2, 3), required (0, 1, 3)" in str(run.errors[0])
    assert len(run.errors) >= 2
    assert set(asked) == {"GET"}
    assert objects(tmp_path) == []


def test_a_dead_server_is_set_aside_while_another_works(flow: Flow, target: HFTarget) -> None:
    run = replace(flow, servers=["http://127.0.0.1:9", *flow.servers]).start()
    assert run.errors == []
    assert run.trained() == ALL
    assert run.produced is not None
    assert run.produced.retried == 0


def test_a_server_that_comes_back_is_used_again(flow: Flow, target: HFTarget) -> None:
    """Alone, down for three answers in the middle: connections are cut."""
    calls = []

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        calls.append(verb)
        down = 8 <= len(calls) < 11
        return (0, b"") if down else forwarding(flow.servers[0], lambda *_: None)(verb, path, body)

    with http_server(handle) as url:
        run = replace(flow, servers=[url]).start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert calls.count("GET") >= 2


def crash(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes]:
    return 500, json.dumps(error_json("bad kernel")).encode()


def drop(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes]:
    return 0, b""


def garble(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes]:
    return 200, b"<html>\xff"


@pytest.mark.parametrize("fault", [crash, drop, garble])
def test_a_server_that_fails_everything_costs_no_retry_beside_a_healthy_one(
    fault: Fault, flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    asked = []

    def counted(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
        asked.append(request.sample_id)
        return fault(request, status, body)

    config = QUICK.model_copy(update={"retries": 0})
    with http_server(forwarding(flow.servers[0], counted)) as url:
        run = replace(flow, servers=[url, *flow.servers], producer=config).start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert asked, "the failing server was never asked"
    assert run.produced is not None
    assert run.produced.retried == len(asked)
    assert objects(tmp_path) == []


@contextmanager
def reference(target: HFTarget, store: FeatureStore) -> Generator[str]:
    with ReferenceServer(target, store, "127.0.0.1", 0) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.02)
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_reference_server_that_cannot_write_costs_no_retry_beside_one_that_can(
    flow: Flow, target: HFTarget, qwen3_folder: Path, tmp_path: Path
) -> None:
    full = FileStore(kind="files", folder=str(tmp_path / "objects"), capacity_bytes=1)
    config = QUICK.model_copy(update={"retries": 0})
    with (
        closing(open_store(full, contribute=True)) as store,
        closing(HFTarget(qwen3_folder, flow.spec)) as another,
        reference(another, store) as failing,
        reference(target, flow.store) as healthy,
    ):
        run = replace(flow, servers=[failing, healthy], producer=config).start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert any("no room for" in line for line in run.told)
    assert objects(tmp_path) == []


def test_a_sample_that_every_server_fails_ends_the_run_naming_it(flow: Flow, tmp_path: Path) -> None:
    asked: Counter[str] = Counter()

    def at(name: str) -> Fault:
        def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
            if ":7" not in request.sample_id or "/0-" not in request.key:
                return None
            asked[name] += 1
            return crash(request, status, body)

        return fault

    config = QUICK.model_copy(update={"retries": 1})
    upstream = flow.servers[0]
    with http_server(forwarding(upstream, at("a"))) as a, http_server(forwarding(upstream, at("b"))) as b:
        run = replace(flow, servers=[a, b], producer=config).start()
    assert len(run.errors) >= 2
    for error in run.errors:
        assert "prompts.jsonl:7 (epoch 0, position" in str(error)
        assert f"captured in {asked.total()} attempts, deployment.producer.retries is 1" in str(error)
        assert "bad kernel" in str(error)
    assert asked.keys() == {"a", "b"}
    assert objects(tmp_path) == []


def test_without_any_server_the_run_ends_saying_why(flow: Flow) -> None:
    config = QUICK.model_copy(update={"outage_seconds": 0.3})
    run = replace(flow, servers=["http://127.0.0.1:9"], producer=config).start()
    assert len(run.errors) >= 2
    for error in run.errors:
        assert "no capture server can be used" in str(error)
        assert "http://127.0.0.1:9: http://127.0.0.1:9: ConnectionRefusedError" in str(error)


def test_no_more_is_held_than_the_marks_allow(flow: Flow, tmp_path: Path) -> None:
    most = 0

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        nonlocal most
        most = max(most, len({name.partition("%2F")[2].partition("%2F")[0] for name in objects(tmp_path)}))

    run = start_with(fault, flow, high_samples=4, low_samples=4)
    assert run.errors == []
    assert run.trained() == ALL
    assert 1 < most <= 4


def test_marks_below_a_window_are_refused(flow: Flow) -> None:
    with pytest.raises(
        ValueError,
        match=r"^deployment\.producer\.low_samples is 3; required: at least one optimizer window, 4",
    ):
        replace(flow, producer=QUICK.model_copy(update={"low_samples": 3})).start()
    with pytest.raises(ValueError, match="high_bytes is 100; required: at least the largest optimizer"):
        replace(flow, producer=QUICK.model_copy(update={"high_bytes": 100})).start()


def test_a_full_store_is_waited_for(flow: Flow, target: HFTarget, tmp_path: Path) -> None:
    """There is room for six samples at most and the marks allow for all sixteen."""
    samples = [flow.prompts.row(index) for index in range(10)]
    largest = max(len(row.input_ids) for row in samples) * 4 * 32 * 4
    config = QUICK.model_copy(update={"retries": 1000})
    with limited(flow, target, tmp_path, 6 * largest) as url:
        run = replace(flow, servers=[url], producer=config).start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert objects(tmp_path) == []


def test_a_store_too_small_for_a_window_ends_the_run_saying_so(
    flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    with limited(flow, target, tmp_path, 100) as url:
        run = replace(flow, servers=[url], producer=QUICK.model_copy(update={"retries": 1})).start()
    assert len(run.errors) >= 2
    for error in run.errors:
        assert "could not be captured in 2 attempts" in str(error)
        assert "no room for" in str(error)
        assert "store.capacity_bytes 100" in str(error)
    assert objects(tmp_path) == []


def test_a_stop_inside_a_window_trains_whole_windows_and_settles_the_rest(
    flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    """Ten samples are captured when the producer is stopped; windows have four. The eleventh hangs."""
    captured = 0
    ended = threading.Event()

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        nonlocal captured
        if captured == 10:
            ended.wait(30)
        captured += 1

    def stop(step: int, producer: Producer) -> None:
        if step == 2:
            wait_until(lambda: captured == 10)
            producer.stop()
            wait_until(lambda: ended_at(flow) == 2)
            ended.set()

    with http_server(forwarding(flow.servers[0], fault)) as url:
        one = QUICK.model_copy(update={"in_flight": 1, "drain_seconds": 2})
        run = replace(flow, servers=[url], producer=one, before_step=stop).start()
    assert run.errors == []
    assert run.trained() == ALL[:8]
    assert run.produced is not None
    assert run.produced.stopped
    settled = "stopped: features end after step 2; 2 samples of a window that was not filled are settled"
    assert settled in run.told
    assert "the producer was stopped: features end after step 2 of 4" in run.told
    assert objects(tmp_path) == []

    resumed = flow.start(start_step=2)
    assert resumed.errors == []
    assert resumed.trained() == ALL[8:]
    assert resumed.told[0].startswith("2 samples had been captured, settled and freed without being trained")


@contextmanager
def stuck(flow: Flow, drain_seconds: float) -> Generator[tuple[Producer, Future[Produced], Ledger]]:
    """A producer whose server hangs, and the ledger of a trainer that takes no step."""
    released, asked = threading.Event(), threading.Event()

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        asked.set()
        released.wait(SECONDS)

    config = QUICK.model_copy(update={"drain_seconds": drain_seconds})
    parts = flow.prompts, flow.plan, flow.spec
    with (
        http_server(forwarding(flow.servers[0], fault)) as url,
        closing(Ledger(flow.folder, flow.plan, flow.spec, "trainer")) as trainer,
        closing(Ledger(flow.folder, flow.plan, flow.spec, "producer")) as ledger,
        ThreadPoolExecutor(1) as thread,
    ):
        trainer.open_session(0, flow.plan.total_steps)
        producer = Producer(config, [url], flow.store, ledger, *parts, lambda _: None)
        running = thread.submit(producer.run)
        try:
            wait_until(asked.is_set)
            yield producer, running, trainer
        finally:
            producer.stop()
            producer.stop()
            released.set()


def test_a_stop_takes_its_seconds_once(flow: Flow) -> None:
    """Requests, the trainer and the threads each take all the time that they are given."""
    with stuck(flow, 5) as (producer, running, _):
        began = time.monotonic()
        producer.stop()
        assert running.result(SECONDS).stopped
        assert 4 < time.monotonic() - began < 11


def test_stop_requests_end_the_wait_for_requests_that_nobody_needs(flow: Flow) -> None:
    with stuck(flow, 600) as (producer, running, trainer):
        trainer.close_session()
        wait_until(lambda: producer.leave_at < math.inf)
        producer.stop()
        producer.stop()
        assert running.result(SECONDS).stopped


def test_a_second_stop_request_ends_it_soon(flow: Flow, tmp_path: Path) -> None:
    def stop(step: int, producer: Producer) -> None:
        if step == 2:
            producer.stop()
            producer.stop()

    began = time.monotonic()
    patient = QUICK.model_copy(update={"drain_seconds": 600})
    run = replace(flow, producer=patient, before_step=stop).start()
    assert time.monotonic() - began < 60
    assert run.produced is not None
    assert run.produced.stopped
    assert objects(tmp_path) == []


def test_a_producer_does_not_wait_for_a_trainer_for_ever(flow: Flow) -> None:
    config = QUICK.model_copy(update={"trainer_seconds": 0.2})
    with (
        closing(Ledger(flow.folder, flow.plan, flow.spec, "producer")) as ledger,
        pytest.raises(TimeoutError, match="no trainer has been running"),
    ):
        Producer(config, flow.servers, flow.store, ledger, flow.prompts, flow.plan, flow.spec).run()


def test_sweeping_frees_what_a_killed_producer_left(flow: Flow, tmp_path: Path, spec: CaptureSpec) -> None:
    assert sweep(flow.folder, flow.store) == 0
    with closing(Ledger(flow.folder, flow.plan, spec, "producer")) as ledger:
        with pytest.raises(ValueError, match="a producer is running"):
            sweep(flow.folder, flow.store)
        left = tmp_path / "objects" / f"{ledger.identity}.1%2F0-0-1%2F0"
    left.write_bytes(b"features")
    (tmp_path / "objects" / "another%2F0-0-1%2F0").write_bytes(b"features of another run")
    assert sweep(flow.folder, flow.store) == 1
    assert objects(tmp_path) == ["another%2F0-0-1%2F0"]
