"""Whole flows in one process: a real target behind HTTP, a real store, ranks as threads."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from feature_flow import (
    CONSUMER,
    QUICK,
    Flow,
    forwarding,
    http_server,
    objects,
    require_states,
)

from specforge_capture.remote import RemoteStream
from specforge_capture.targets.hf import HFTarget
from specforge_capture.wire import CaptureRequest

ALL = [(epoch, position) for epoch in range(2) for position in range(8)]


def test_ranks_get_the_plans_batches_and_nothing_is_left(
    flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    run = flow.start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert run.produced is not None
    assert (run.produced.captured, run.produced.retried, run.produced.stopped) == (16, 0, False)
    assert objects(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_arrive_on_a_gpu_beside_its_work(flow: Flow, target: HFTarget) -> None:
    on_gpu = replace(flow, device="cuda:0", before_step=lambda *_: torch.cuda._sleep(50_000_000))
    run = on_gpu.start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan, "cuda:0")


def test_a_stream_starts_at_the_checkpoint(flow: Flow, target: HFTarget, tmp_path: Path) -> None:
    first = flow.start(total_steps=3)
    run = flow.start(start_step=1)
    assert (first.errors, run.errors) == ([], [])
    assert run.trained() == ALL[4:]
    require_states(run, target, flow.prompts, flow.plan)
    assert run.told == ["8 samples were captured after step 1, the checkpoint: they are captured anew"]
    assert objects(tmp_path) == []


def test_no_more_is_fetched_ahead_than_allowed(flow: Flow) -> None:
    one = replace(flow, consumer=CONSUMER.model_copy(update={"ahead_batches": 1}))
    largest = max(batch.state_bytes for rank in one.start().batches for batch in rank)
    assert 0 < one.peak_bytes <= largest
    tight = replace(flow, consumer=CONSUMER.model_copy(update={"ahead_batches": 8, "ahead_bytes": 1}))
    run = tight.start()
    assert run.trained() == ALL
    assert 0 < tight.peak_bytes <= largest


def _objects_of(tmp_path: Path, request: CaptureRequest) -> list[Path]:
    return [tmp_path / "objects" / name for name in objects(tmp_path, request.key)]


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [remove, truncate, change])
def test_a_missing_short_or_changed_object_is_captured_anew(
    spoil: Callable[[Path], None], flow: Flow, target: HFTarget, tmp_path: Path
) -> None:
    spoilt: set[str] = set()

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        if request.key.endswith("-1") and len(request.input_ids) > 15:
            spoil(_objects_of(tmp_path, request)[-1])
            spoilt.add(request.key)

    with http_server(forwarding(flow.servers[0], fault)) as url:
        run = replace(flow, servers=[url]).start()
    assert run.errors == []
    assert run.trained() == ALL
    require_states(run, target, flow.prompts, flow.plan)
    assert run.produced is not None
    assert run.produced.retried == len(spoilt) > 0
    assert objects(tmp_path) == []


def test_a_sample_that_is_lost_each_time_ends_the_run_naming_it(flow: Flow, tmp_path: Path) -> None:
    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        if request.sample_id.endswith(":7"):
            remove(_objects_of(tmp_path, request)[0])

    with http_server(forwarding(flow.servers[0], fault)) as url:
        config = QUICK.model_copy(update={"retries": 2})
        run = replace(flow, servers=[url], producer=config).start()
    assert len(run.errors) >= 2
    for error in run.errors:  # the producer's, and that of the rank that waits
        assert "prompts.jsonl:7 (epoch 0, position" in str(error)
        assert "lost or changed 3 times" in str(error)
    assert objects(tmp_path) == []


def test_ranks_do_not_wait_for_a_producer_that_is_gone(flow: Flow) -> None:
    config = CONSUMER.model_copy(update={"producer_seconds": 0.3})
    run = replace(flow, consumer=config).start(producer=False)
    assert len(run.errors) >= 1
    assert all("no producer has been running" in str(error) for error in run.errors)


def test_ranks_do_not_wait_for_features_for_ever(flow: Flow) -> None:
    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes]:
        return 503, b"{}"

    config = CONSUMER.model_copy(update={"wait_seconds": 0.5})
    slow = QUICK.model_copy(update={"retries": 50, "drain_seconds": 1})
    with http_server(forwarding(flow.servers[0], fault)) as url:
        run = replace(flow, servers=[url], consumer=config, producer=slow).start()
    assert len(run.errors) >= 1
    assert all("no features of step 1 came" in str(error) for error in run.errors)


def test_another_prompt_set_is_refused(flow: Flow) -> None:
    other = replace(flow.plan, fingerprint="other")
    parts = flow.store, flow.prompts, other, flow.spec, CONSUMER, dist.HashStore(), torch.device("cpu")
    with pytest.raises(ValueError, match="other prompts"):
        RemoteStream(*parts, total_steps=1)
