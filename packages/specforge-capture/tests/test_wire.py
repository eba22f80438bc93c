"""The client against a real HTTP server that says what a test wants."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
from specforge_capture.refs import FeatureRef
from specforge_capture.wire import (
    CaptureClient,
    CaptureRequest,
    ServerDescription,
    answer_json,
    error_json,
)
from specforge_config.features import CaptureSpec, spec_hash

REF = FeatureRef("run/0-1-0", "a:1", 3, 8, "float32", 2, (5, 6), "hash")
Answer = tuple[int, Any]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str, Any], Answer]], CaptureClient]]:
    """Starts a server that answers (path, body) with what a function returns; gives a client of it."""
    servers: list[ThreadingHTTPServer] = []

    def start(answer: Callable[[str, Any], Answer]) -> CaptureClient:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                status, body = answer(self.path, json.loads(self.rfile.read(size) or "null"))
                text = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_POST = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return CaptureClient(f"http://127.0.0.1:{server.server_port}/", timeout=20)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def capture(client: CaptureClient) -> FeatureRef:
    return client.capture(REF.key, REF.sample_id, [7, 8, 9], REF.spec_hash)


def test_a_capture_is_asked_for_and_answered(serve: Any) -> None:
    seen = []

    def answer(path: str, body: Any) -> Answer:
        seen.append((path, body))
        return 200, {"text": "", **answer_json(REF)}

    assert capture(serve(answer)) == REF
    ((path, body),) = seen
    assert path == "/generate"
    assert body["input_ids"] == [7, 8, 9]
    assert body["rid"] == body["extra_key"] == "run/0-1-0"
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert CaptureRequest.from_json(body) == CaptureRequest("run/0-1-0", "a:1", (7, 8, 9), "hash")


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (500, error_json("the store is full"), RequestFailed, "HTTP 500: the store is full"),
        (503, b"<html>busy</html>", RequestFailed, "HTTP 503: b'<html>busy"),
        (429, error_json("later"), RequestFailed, "HTTP 429: later"),
        (400, error_json("too long"), RequestRefused, "HTTP 400: too long"),
        (404, b"", RequestRefused, "HTTP 404"),
        (200, b"not json", RequestFailed, "the answer is no JSON"),
        (200, {"text": ""}, RequestFailed, "holds no spec_capture"),
        (200, {"meta_info": {"spec_capture": []}}, RequestFailed, "required: one feature ref"),
        (200, {"meta_info": {"spec_capture": [REF.to_json()] * 2}}, RequestFailed, "one feature ref"),
        (200, {"meta_info": {"spec_capture": [{"key": "x"}]}}, RequestFailed, "not a feature ref"),
        (
            200,
            answer_json(FeatureRef("run/0-1-0", "a:1", 2, 8, "float32", 2, (5,), "hash")),
            RequestFailed,
            "rows 2, asked for 3",
        ),
        (
            200,
            answer_json(FeatureRef("run/0-1-9", "a:1", 3, 8, "float32", 2, (5, 6), "hash")),
            RequestFailed,
            "key 'run/0-1-9', asked for 'run/0-1-0'",
        ),
    ],
)
def test_what_is_no_capture_is_an_error(
    serve: Any, status: int, body: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        capture(serve(lambda path, asked: (status, body)))


def test_a_silent_or_missing_server_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = CaptureClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        began = time.monotonic()
        with pytest.raises(ServerDown, match="timed out"):
            capture(client)
        assert time.monotonic() - began < 10
    with pytest.raises(ServerDown, match="refused"):
        capture(client)


def test_a_connection_that_breaks_is_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = CaptureClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=20)
        breaking = threading.Thread(target=lambda: server.accept()[0].close())
        breaking.start()
        with pytest.raises(ServerDown):
            capture(client)
        breaking.join(20)


def test_a_server_tells_what_it_captures(serve: Any, spec: CaptureSpec) -> None:
    told = {"version": "0", "spec_capture": ServerDescription.of(spec).to_json()}
    client = serve(lambda path, body: (200, told if path == "/server_info" else None))
    description = client.describe()
    assert description == ServerDescription((0, 2, 3), True, spec_hash(spec), "dspark")
    description.require(spec)
    with pytest.raises(ValueError, match=r"layer_ids is \(0, 2, 3\), required \(0, 1\); spec_hash is"):
        description.require(spec.model_copy(update={"layer_ids": (0, 1)}))
    with pytest.raises(RequestRefused, match="required: spec_capture"):
        serve(lambda path, body: (200, {"version": "0"})).describe()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "https://host:1", "http://host", "http://host:1/path"])
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="required: "):
        CaptureClient(url, timeout=1)


GOOD = CaptureRequest("k", "s", (1, 2), "h").to_json()


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {**GOOD, "input_ids": []},
        {**GOOD, "input_ids": [1, "2"]},
        {**GOOD, "input_ids": [1, -2]},
        {**GOOD, "input_ids": 5},
        {**GOOD, "sampling_params": None},
        {**GOOD, "sampling_params": {"custom_params": {"spec_capture": {"key": "k"}}}},
        {
            **GOOD,
            "sampling_params": {
                "custom_params": {"spec_capture": {"key": "", "sample_id": "s", "spec_hash": ""}}
            },
        },
    ],
)
def test_a_malformed_request_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match="capture request"):
        CaptureRequest.from_json(body)
