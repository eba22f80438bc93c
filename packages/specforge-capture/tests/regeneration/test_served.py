"""Batches of answers from real HTTP servers that say what a test wants; tests/sglang asks SGLang itself."""

import json
import threading
import time
from typing import Any

import pytest
from feature_flow import http_server

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
from specforge_capture.regeneration import served
from specforge_capture.regeneration.served import AnswerClient, ServedBatch
from specforge_capture.targets.batch import Answer, Request
from specforge_capture.targets.sampling import Sampling


def finished(tokens: Any, kind: str = "stop", matched: Any = 3) -> tuple[int, bytes]:
    reason = {"type": kind, **({"matched": matched} if kind == "stop" else {})}
    return 200, json.dumps({"output_ids": tokens, "meta_info": {"finish_reason": reason}}).encode()


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
        batch.close()
    assert taken == {"fast": 7, "slow": 1}
    assert sorted(request.key[0] for request, _ in answers) == list(range(8))
    assert all(answer == Answer(request.prompt, "stop") for request, answer in answers)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed request is asked again without a pause."""
    monkeypatch.setattr(served, "_PAUSES_SECONDS", (0.0, 0.0))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (finished([]), RequestFailed, "row 1 of the prompts, answer 1: http.* ended after 0 of 9 tokens"),
        (finished([4], "abort"), RequestFailed, "ended after 1 of 9 tokens: {'type': 'abort'}"),
        (finished([4], "length"), RequestFailed, "ended after 1 of 9 tokens"),
        (finished([4, 3], matched="NaN happened"), RequestFailed, "NaN happened"),
        (finished(None), RequestFailed, "required: output_ids and a finish_reason"),
        ((200, b'{"text": "x"}'), RequestFailed, "required: output_ids and a finish_reason"),
        ((500, b'{"message": "out of memory"}'), RequestFailed, "HTTP 500: out of memory"),
        ((400, b'{"error": {"message": "longer than the context"}}'), RequestRefused, "longer than the"),
        ((0, b""), ServerDown, "RemoteDisconnected"),
    ],
)
def test_what_went_wrong_is_told_and_no_answer_lost(
    reply: tuple[int, bytes], error: type[Exception], message: str
) -> None:
    others = threading.Semaphore(0)

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        if json.loads(body)["input_ids"] == [1]:
            return reply
        others.acquire(timeout=20)
        return echo(verb, path, body)

    with http_server(handle) as url:
        batch = ServedBatch([AnswerClient(url, 20)], {3}, 4, Sampling())
        batch.admit(requests(4))
        deadline = time.monotonic() + 20
        while batch._answered.qsize() < 1:  # the failure comes first
            assert time.monotonic() < deadline
            time.sleep(0.01)
        others.release(3)
        while batch._answered.qsize() < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answers: list[tuple[Request, Answer]] = []
        with pytest.raises(error, match=message):
            collect(batch, answers)
        batch.close()
        assert sorted(request.key[0] for request, _ in answers) == [1, 2, 3]


@pytest.mark.usefixtures("at_once")
def test_a_failed_request_is_asked_again() -> None:
    failures = iter([(503, b"busy"), (500, b"once more")])

    def handle(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        return next(failures, None) or echo(verb, path, body)

    with http_server(handle) as url:
        batch = ServedBatch([AnswerClient(url, 20)], {3}, 1, Sampling())
        batch.admit(requests(2))
        answers: list[tuple[Request, Answer]] = []
        collect(batch, answers)
        batch.close()
    assert [request.key[0] for request, _ in answers] == [0, 1]


def test_a_lost_server_is_left_out_and_its_requests_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    taken = threading.Event()

    def lost(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        taken.set()
        return 0, b""

    def other(verb: str, path: str, body: bytes) -> tuple[int, bytes]:
        taken.wait(20)
        return echo(verb, path, body)

    with http_server(lost) as first, http_server(other) as second:
        batch = ServedBatch([AnswerClient(url, 20) for url in (first, second)], {3}, 2, Sampling())
        batch.admit(requests(4))
        answers: list[tuple[Request, Answer]] = []
        collect(batch, answers)
        assert sorted(request.key[0] for request, _ in answers) == [0, 1, 2, 3]
        assert batch.free == 2
        assert f"{first}: RemoteDisconnected" in caplog.text
        assert "going on with 1 server" in caplog.text
        batch.close()


def test_an_end_at_the_limit_is_an_end() -> None:
    with http_server(lambda verb, path, body: finished([5] * 8 + [3], "length")) as url:
        answer = AnswerClient(url, 20).answer(Request((0, 0), [1], 9), {3}, Sampling())
    assert answer == Answer([5] * 8 + [3], "stop"), "0.5.14 calls it the limit"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "half"}, "computes in float16, required float32: set target.dtype"),
        ({"dtype": "auto"}, "computes in half precision, required float32"),
        ({"max_req_input_len": 199}, "takes 199 tokens, required 200: lower data.max_length"),
        ({"version": None}, "required: that of an SGLang server"),
    ],
)
def test_a_server_that_cannot_serve_the_run_is_refused(
    recipe: Any, change: dict[str, Any], message: str
) -> None:
    config = recipe()
    fits = {"version": "0.5.18", "model_path": "hub/id", "dtype": "float", "max_req_input_len": 200}
    told = {name: value for name, value in {**fits, **change}.items() if value is not None}
    with http_server(lambda verb, path, body: (200, json.dumps(fits).encode())) as url:
        assert AnswerClient(url, 20).require(config).version == "0.5.18"
    with (
        http_server(lambda verb, path, body: (200, json.dumps(told).encode())) as url,
        pytest.raises(ValueError, match=message),
    ):
        AnswerClient(url, 20).require(config)


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
            batch.close()
    seeds = [parameters.pop("sampling_seed", None) for parameters in seen]
    assert seeds[0:2] == seeds[2:4]
    assert len({*seeds[0:2], *seeds[4:6]}) == 4
    assert seeds[6:] == [None, None]
    wanted = {"temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_new_tokens": 9, "stop_token_ids": [3, 7]}
    assert seen[0] | wanted == seen[0]
    wanted |= {"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert seen[6] | wanted == seen[6]
