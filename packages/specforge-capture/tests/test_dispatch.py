"""Rank 0's thread against a real ledger, with the ranks' and the producer's parts played by the test."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist
from feature_flow import CONSUMER
from ledger_parts import PLAN, SPEC, capture, ref_of

from specforge_capture.dispatch import Dispatcher, recapture_box, report_box, window_box
from specforge_capture.ledger import Ledger
from specforge_capture.mail import Mailbox, StreamFailed
from specforge_config.producer import ConsumerConfig


def wait_for(look: Callable[[], object]) -> object:
    deadline = time.monotonic() + 30
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def receive(box: Mailbox) -> dict:
    return wait_for(box.receive)  # ty: ignore[invalid-explicit-return]


@pytest.fixture
def mail() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path, PLAN, SPEC, "producer")) as ledger:
        yield ledger


def dispatcher(folder: Path, mail: dist.Store, config: ConsumerConfig = CONSUMER) -> Dispatcher:
    return Dispatcher(folder, PLAN, SPEC, config, mail, total_steps=4)


def close(dispatcher: Dispatcher, mail: dist.Store) -> None:
    for rank in range(2):
        report_box(mail, rank).send({"closed": True})
    dispatcher.close()


def test_each_rank_gets_its_refs_of_whole_windows(tmp_path: Path, mail: dist.Store, producer: Ledger) -> None:
    dispatching = dispatcher(tmp_path, mail)
    producer.attend()
    entries = capture(producer, 1)
    for rank in range(2):
        message = receive(window_box(mail, rank))
        own = [[ref_of(entry).to_json() for entry in part] for part in PLAN.micro_batches(entries, rank)]
        assert message == {"step": 1, "refs": own}
    close(dispatching, mail)
    assert not producer.state().open


def test_a_window_is_acknowledged_when_all_ranks_have(
    tmp_path: Path, mail: dist.Store, producer: Ledger
) -> None:
    dispatching = dispatcher(tmp_path, mail)
    producer.attend()
    for step in (1, 2):
        capture(producer, step)
    reports = [report_box(mail, rank) for rank in range(2)]
    windows = window_box(mail, 0)
    assert [receive(windows)["step"], receive(windows)["step"]] == [1, 2]
    reports[0].send({"acknowledged": 1})
    reports[0].send({"acknowledged": 2})
    reports[1].send({"acknowledged": 1})
    wait_for(lambda: producer.state().acknowledged)
    assert producer.state().acknowledged == 1
    assert {entry.step for entry in producer.acknowledged()} == {1}
    for report in reports:
        report.send({"closed": True})
    dispatching.close()


def test_a_lost_sample_comes_back_to_the_rank_that_lost_it(
    tmp_path: Path, mail: dist.Store, producer: Ledger
) -> None:
    dispatching = dispatcher(tmp_path, mail)
    producer.attend()
    lost = capture(producer, 1)[1]
    receive(window_box(mail, 1))
    report = report_box(mail, 1)
    report.send({"lost": lost.task, "key": lost.key})
    (again,) = wait_for(lambda: producer.planned(1))  # ty: ignore[not-iterable]
    producer.commit([ref_of(again)], [again.task])
    assert receive(recapture_box(mail, 1)) == {"ref": ref_of(again).to_json()}
    report.send({"closed": True})
    report_box(mail, 0).send({"closed": True})
    dispatching.close()


def test_the_producers_failure_reaches_all_ranks(tmp_path: Path, mail: dist.Store, producer: Ledger) -> None:
    dispatching = dispatcher(tmp_path, mail)
    producer.attend()
    producer.fail("ValueError: sample 7 was refused")
    for rank in range(2):
        with pytest.raises(StreamFailed, match="the producer failed: ValueError: sample 7 was refused"):
            receive(window_box(mail, rank))
    dispatching.close()


def test_a_producer_that_vanishes_is_told(tmp_path: Path, mail: dist.Store, producer: Ledger) -> None:
    config = CONSUMER.model_copy(update={"producer_seconds": 0.2})
    dispatching = dispatcher(tmp_path, mail, config)
    producer.attend()
    capture(producer, 1)
    receive(window_box(mail, 0))
    producer.close()
    for rank in range(2):  # while they train on the first window, they need none
        report_box(mail, rank).send({"acknowledged": 1})
    with pytest.raises(StreamFailed, match="no producer has been running"):
        receive(window_box(mail, 0))
    dispatching.close()


def test_one_trainer_at_a_time(tmp_path: Path, mail: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specforge_capture.locks._GONE_SECONDS", 0.1)
    dispatching = dispatcher(tmp_path, mail)
    with pytest.raises(ValueError, match="already has a running trainer"):
        dispatcher(tmp_path, mail)
    close(dispatching, mail)
