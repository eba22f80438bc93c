import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from feature_flow import QUICK, Flow, forwarding, http_server, wait_until

from specforge_capture.http_client import RequestRefused, ServerDown
from specforge_capture.ledger import Entry
from specforge_capture.refs import FeatureRef
from specforge_capture.servers import Answer, Question, ServerPool, backoff
from specforge_capture.wire import CaptureRequest
from specforge_config.producer import ProducerConfig

NOWHERE = "http://127.0.0.1:9"


@contextmanager
def pool_of(flow: Flow, *urls: str, config: ProducerConfig = QUICK) -> Generator[ServerPool]:
    pool = ServerPool(urls or flow.servers, config, flow.spec)
    try:
        yield pool
    finally:
        pool.close(deadline_in(30))


def deadline_in(seconds: float) -> Callable[[], float]:
    deadline = time.monotonic() + seconds
    return lambda: deadline


def question(flow: Flow, position: int) -> Question:
    task = flow.plan.window(0)[position]
    entry = Entry(0, position, 1, 1, f"run.1/0-{position}-1")
    return Question(entry, flow.prompts.row(task.row, entry.task))


def answers(pool: ServerPool, count: int) -> list[Answer]:
    deadline, found = time.monotonic() + 30, []
    while len(found) < count:
        assert time.monotonic() < deadline
        if (answer := pool.answer(0.05)) is not None:
            found.append(answer)
    return found


def test_waits_double_up_to_half_a_minute() -> None:
    assert [backoff(0.5, failures) for failures in (1, 2, 3, 7, 8, 1000)] == [0.5, 1, 2, 30, 30, 30]
    assert backoff(60, 3) == 60


def test_each_question_is_answered_once(flow: Flow) -> None:
    with pool_of(flow) as pool:
        for position in range(4):
            pool.ask(question(flow, position))
        found = answers(pool, 4)
    assert sorted(answer.question.entry.position for answer in found) == [0, 1, 2, 3]
    for answer in found:
        assert isinstance(answer.result, FeatureRef)
        assert answer.result.key == answer.question.entry.key


def test_the_plans_order_is_kept_and_questions_can_be_withdrawn(flow: Flow) -> None:
    with pool_of(flow, NOWHERE) as pool:
        for position in (2, 0, 3, 1):
            pool.ask(question(flow, position))
        assert [q.entry.position for q in pool.withdraw()] == [0, 1, 2, 3]
        assert pool.withdraw() == []


def test_failures_are_answers_of_their_own_kind(flow: Flow) -> None:
    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes]:
        return (400, b"{}") if request.key.endswith("0-1") else (0, b"")

    with http_server(forwarding(flow.servers[0], fault)) as url, pool_of(flow, url) as pool:
        pool.ask(question(flow, 0))
        pool.ask(question(flow, 1))
        found = {answer.question.entry.position: answer.result for answer in answers(pool, 2)}
    assert isinstance(found[0], RequestRefused)
    assert isinstance(found[1], ServerDown)


def test_a_server_that_fails_one_capture_after_the_other_is_set_aside_until_later(flow: Flow) -> None:
    broken = True

    def fault(request: CaptureRequest, status: int, body: bytes) -> tuple[int, bytes] | None:
        return (500, b"{}") if broken else None

    config = QUICK.model_copy(update={"backoff_seconds": 2})
    with http_server(forwarding(flow.servers[0], fault)) as url, pool_of(flow, url, config=config) as pool:
        (server,) = pool.servers
        assert server.promising
        for failures in (1, 2, 3):
            pool.ask(question(flow, 0))
            answers(pool, 1)
            assert server.up == (failures < 3)
        broken = False
        pool.ask(question(flow, 0))
        assert isinstance(answers(pool, 1)[0].result, FeatureRef)
        broken = True
        pool.ask(question(flow, 0))
        answers(pool, 1)
        assert server.up


def test_a_sample_goes_to_a_server_that_has_not_failed_it(flow: Flow) -> None:
    with pool_of(flow, *flow.servers, NOWHERE) as pool:
        good = frozenset(flow.servers)
        assert pool.others(frozenset())
        assert pool.others(frozenset({NOWHERE}))
        wait_until(lambda: not pool.others(good))  # once the other one was found to be away
        pool.ask(replace(question(flow, 0), tried=good))
        (answer,) = answers(pool, 1)
    assert isinstance(answer.result, FeatureRef)
    assert answer.server == flow.servers[0]


def test_closing_waits_no_longer_than_it_is_told(flow: Flow) -> None:
    released = threading.Event()

    def fault(request: CaptureRequest, status: int, body: bytes) -> None:
        released.wait(30)

    with http_server(forwarding(flow.servers[0], fault)) as url:
        pool = ServerPool([url], QUICK, flow.spec)
        pool.ask(question(flow, 0))
        while pool.withdraw():  # until a thread has taken it
            pool.ask(question(flow, 0))
            time.sleep(0.01)
        began = time.monotonic()
        pool.close(deadline_in(0.2))
        assert time.monotonic() - began < 20
        released.set()


def test_a_run_without_servers_is_refused(flow: Flow) -> None:
    with pytest.raises(ValueError, match="no capture server is given"):
        ServerPool([], QUICK, flow.spec)
