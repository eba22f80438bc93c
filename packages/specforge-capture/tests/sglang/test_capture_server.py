"""A real SGLang server with the plugin, on a CPU: what it captures, and what becomes of failures."""

import fcntl
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specforge_capture.http_client import RequestFailed, RequestRefused
from specforge_capture.wire import FIELD, CaptureRequest
from specforge_config.features import spec_hash
from specforge_config.store import FileStore

CAPACITY = 32 << 20
LENGTHS = (1, 700, 5, 130, 17, 64, 1500, 2, 200, 41, 9, 80)
SECONDS = 60
"""Longest wait of a test, for what takes a fraction of a second on an idle machine."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def store(folder: Path) -> FileStore:
    return FileStore(kind="files", folder=str(folder / "features"), capacity_bytes=CAPACITY)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], folder: Path, store: FileStore) -> Iterator[Any]:
    with serve(folder, store) as running:
        yield running


@pytest.fixture
def objects(store: FileStore) -> Iterator[Callable[[str], list[str]]]:
    """Names of the stored files of a run; a test leaves none behind."""

    def named(run: str) -> list[str]:
        return sorted(path.name for path in Path(store.folder).glob(f"{run}*"))

    yield named
    for path in Path(store.folder).glob("*"):
        if path.name != ".lock":
            path.unlink()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(4, 1024, length).tolist()


def post(server: Any, path: str, body: Any) -> Any:
    request = urllib.request.Request(
        server.client.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.loads(answer.read() or b"null")


def generate(server: Any, tokens: list[int], count: int = 6) -> list[int]:
    """What a plain request makes of `tokens`, greedily."""
    parameters = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return post(server, "/generate", {"input_ids": tokens, "sampling_params": parameters})["output_ids"]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def stalled(store: FileStore) -> Generator[None]:
    """While it lasts, puts wait for their turn on the store's lock."""
    with open(Path(store.folder) / ".lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    # float32 sums in another order, of states up to some tens: a few units in the last place.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("objects")
def test_states_are_those_of_transformers(server: Any, reference: Callable[..., torch.Tensor]) -> None:
    for index, length in enumerate(LENGTHS):
        assert_same(server.capture(f"alone/0-{index}-0", prompt(length)), reference(prompt(length)))


@pytest.mark.usefixtures("objects")
def test_many_at_a_time_between_plain_requests(server: Any, reference: Callable[..., torch.Tensor]) -> None:
    expected = {length: generate(server, prompt(length, 1)) for length in LENGTHS}
    with ThreadPoolExecutor(16) as pool:
        captures: dict[int, Future[torch.Tensor]] = {}
        plain: dict[int, Future[list[int]]] = {}
        for length in LENGTHS:
            captures[length] = pool.submit(server.capture, f"many/0-{length}-0", prompt(length, 1))
            plain[length] = pool.submit(generate, server, prompt(length, 1))
        for length in LENGTHS:
            assert_same(captures[length].result(), reference(prompt(length, 1)))
            assert plain[length].result() == expected[length]


@pytest.mark.usefixtures("objects")
def test_a_cached_prefix_shortens_no_capture(server: Any, reference: Callable[..., torch.Tensor]) -> None:
    tokens = prompt(300, 2)
    generate(server, tokens)
    cached = post(server, "/generate", {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}})
    assert cached["meta_info"]["cached_tokens"] > 200, "the prefix is in the cache, for plain requests"
    assert_same(server.capture("cached/0-0-0", tokens), reference(tokens))
    assert_same(server.capture("cached/0-0-1", tokens), reference(tokens))
    longer = tokens + prompt(10, 3)
    assert_same(server.capture("cached/0-1-0", longer), reference(longer))


def test_a_server_tells_its_contract(server: Any) -> None:
    server.client.describe().require(server.spec)
    other = server.spec.model_copy(update={"tokenizer_hash": "another"})
    with pytest.raises(ValueError, match="spec_hash is"):
        server.client.describe().require(other)


def test_an_answer_waits_for_its_objects_and_for_nothing_else(
    server: Any, store: FileStore, objects: Callable[[str], list[str]]
) -> None:
    with ThreadPoolExecutor() as pool:
        with stalled(store):
            waiting = pool.submit(server.capture, "held/0-0-0", prompt(50))
            eventually(lambda: "#new-token: 50," in server.log.read_text(errors="replace"))
            tokens = generate(server, prompt(60))
            assert generate(server, prompt(60)) == tokens, "plain requests go on"
            assert not waiting.done()
            assert objects("held") == []
        assert waiting.result(SECONDS).shape == (50, 512)
    assert len(objects("held")) == 1


def test_a_failing_store_fails_its_request_alone(
    server: Any, store: FileStore, objects: Callable[[str], list[str]]
) -> None:
    filler = Path(store.folder) / "filler"
    with open(filler, "wb") as file:
        file.truncate(CAPACITY - (600 << 10))
    with ThreadPoolExecutor() as pool:
        # One of 1 MB and one of 20 kB: there is room for the smaller.
        large = pool.submit(server.capture, "full/0-0-0", prompt(500))
        small = pool.submit(server.capture, "full/0-1-0", prompt(10))
        with pytest.raises(RequestFailed, match=r"HTTP 500: capture of sample .*0-0-0' failed: .*no room"):
            large.result(SECONDS)
        assert small.result(SECONDS).shape == (10, 512)
    assert len(objects("full")) == 1
    filler.unlink()
    assert server.capture("full/0-0-1", prompt(500)).shape == (500, 512)


def test_an_aborted_capture_leaves_nothing(
    server: Any, store: FileStore, objects: Callable[[str], list[str]]
) -> None:
    with ThreadPoolExecutor() as pool:
        with stalled(store):
            held = pool.submit(server.capture, "aborted/0-0-0", prompt(70))
            eventually(lambda: "#new-token: 70," in server.log.read_text(errors="replace"))
            post(server, "/abort_request", {"rid": "aborted/0-0-0"})
            with pytest.raises(RequestFailed):
                held.result(SECONDS)
        assert server.capture("aborted/0-1-0", prompt(20)).shape == (20, 512)
    # The writer takes its work in order, and is behind the second.
    assert len(objects("aborted")) == 1


def test_a_client_that_vanishes_leaves_nothing(
    server: Any, store: FileStore, objects: Callable[[str], list[str]]
) -> None:
    asked = CaptureRequest("gone/0-0-0", "sample", tuple(prompt(90)), spec_hash(server.spec))
    body = json.dumps(asked.to_json()).encode()
    host, _, port = server.client.url.removeprefix("http://").partition(":")
    with stalled(store):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            eventually(lambda: "#new-token: 90," in server.log.read_text(errors="replace"))
        # SGLang looks for clients that left every few seconds.
        eventually(lambda: "isconnect" in server.log.read_text(errors="replace"))
    assert server.capture("gone/0-1-0", prompt(20)).shape == (20, 512)
    eventually(lambda: len(objects("gone")) == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec_hash": "another"}, "is for contract another; this server captures"),
        ({"sample_id": 5}, "malformed capture request"),
        ({"key": "another"}, "has the rid 'refused/0-0-0'; required: its key"),
    ],
)
def test_requests_that_cannot_be_captured_are_refused(
    server: Any, change: dict[str, Any], message: str
) -> None:
    body = CaptureRequest("refused/0-0-0", "sample", (5, 6, 7), spec_hash(server.spec)).to_json()
    body["sampling_params"]["custom_params"][FIELD].update(change)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/generate", body)
    assert refused.value.code == 400
    assert message in json.loads(refused.value.read())["error"]["message"]


def test_a_prompt_beyond_the_context_is_refused(server: Any) -> None:
    with pytest.raises(RequestRefused, match="HTTP 400"):
        server.capture("long/0-0-0", prompt(4000))
