"""Batches of answers from real HTTP servers that say what a test wants; tests/sglang asks SGLang itself."""

import json
import threading
import time
from typing import Any

import pytest
from feature_flow import http_server

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
from specforge_capture.regeneration.served import AnswerClient, ServedBatch
from specforge_capture.targets.batch import Answer, Request
from specforge_capture.targets.sampling import Sampling


def finished(tokens: list[int], kind: str = "stop") -> tuple[int, bytes]:
    return 200, json.dumps({"output_ids": tokens, "meta_info": {"finish_reason": {"type": kind}}}).encode()


def echo(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
    return finished(json.loads(body)["input_ids"])


def collect(batch: ServedBatch, answers: list[tuple[Request, Answer]]) -> None:
    """Take all answers that are owed."""
    deadline = time.monotonic() + 30
    while batch.running:
        assert time.monotonic() < deadline
        answers += batch.advance()


def requests(count: int) -> list[Request]:
    return [Request((index, 0), [index + 1], 9) for index in range(count)]


def test_a_slow_server_takes_fewer_requests() -> None:
    taken = {"fast": 0, "slow": 0}
    lock, other_is_done = threading.Lock(), threading.Event()

    def count(name: str) -> Any:
        def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
            with lock:
                taken[name] += 1
            if name == "slow":
                other_is_done.wait(20)
            elif taken["fast"] == 7:
                other_is_done.set()
            return echo(verb, path, body)

        return handle

    with http_server(count("fast")) as fast, http_server(count("slow")) as slow:
        batch = ServedBatch([AnswerClient(url, 20) for url in (fast, slow)], {3}, 1, Sampling())
        assert batch.free == 2
        answers: list[tuple[Request, Answer]] = []
        left = requests(8)
        deadline = time.monotonic() + 30
        while left or batch.running:
            assert time.monotonic() < deadline
            batch.admit([left.pop(0) for _ in range(min(batch.free, len(left)))])
            answers += batch.advance()
    assert taken == {"fast": 7, "slow": 1}
    assert sorted(request.key[0] for request, _ in answers) == list(range(8))
    assert all(answer == Answer(request.prompt, "stop") for request, answer in answers)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (finished([], "stop"), RequestFailed, "ended after 0 tokens"),
        (finished([4], "abort"), RequestFailed, "ended after 1 tokens: {'type': 'abort'}"),
        ((200, b'{"text": "x"}'), RequestFailed, "required: output_ids and a finish_reason"),
        ((500, b'{"message": "out of memory"}'), RequestFailed, "HTTP 500: out of memory"),
        ((400, b'{"error": {"message": "longer than the context"}}'), RequestRefused, "longer than the"),
        ((0, b""), ServerDown, "RemoteDisconnected"),
    ],
)
def test_what_went_wrong_is_told_and_no_answer_lost(
    reply: tuple[int, bytes], error: type[Exception], message: str
) -> None:
    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        return reply if json.loads(body)["input_ids"] == [3] else echo(verb, path, body)

    with http_server(handle) as url:
        batch = ServedBatch([AnswerClient(url, 20)], {3}, 1, Sampling())
        batch.admit(requests(3))
        time.sleep(0.3)  # so that the answers and the failure wait side by side
        answers: list[tuple[Request, Answer]] = []
        with pytest.raises(error, match=message):
            collect(batch, answers)
        assert [request.key[0] for request, _ in answers] == [0, 1]


def test_each_answer_has_a_seed_of_its_own() -> None:
    seen: list[Any] = []

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        seen.append(json.loads(body)["sampling_params"])
        return echo(verb, path, body)

    with http_server(handle) as url:
        for sampling in (Sampling(1.0, 0.9, 1), Sampling(1.0, 0.9, 1), Sampling(1.0, 0.9, 2), Sampling()):
            batch = ServedBatch([AnswerClient(url, 20)], [7, 3], 1, sampling)
            batch.admit(requests(2))
            collect(batch, [])
    seeds = [parameters.pop("sampling_seed", None) for parameters in seen]
    assert seeds[0:2] == seeds[2:4]
    assert len({*seeds[0:2], *seeds[4:6]}) == 4
    assert seeds[6:] == [None, None]
    assert seen[0] == {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 9, "stop_token_ids": [3, 7]}
    assert seen[6] == {"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 9, "stop_token_ids": [3, 7]}
