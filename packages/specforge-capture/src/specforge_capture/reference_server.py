"""A capture server over the `hf` target: for models that SGLang lacks, machines without it, and tests.

It speaks the wire format of SGLang's plugin (`wire`) and writes through the same `Sink`. One prompt is
captured at a time, while the features of those before it are written.

Invariant: a request is answered once its features can be read, or with why they cannot: 400 where asking
again is no use, 500 where it may be.
"""

import json
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import torch

from specforge_capture.refs import FeatureRef, feature_width
from specforge_capture.sink import Outcome, Sink
from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.targets.base import PromptRow
from specforge_capture.targets.hf import HFTarget
from specforge_capture.wire import FIELD, CaptureRequest, ServerDescription, answer_json, error_json
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.store import FileStore, MooncakeStore


def serve(
    target: str,
    spec: CaptureSpec,
    store: MooncakeStore | FileStore,
    host: str,
    port: int,
    *,
    device: str = "cpu",
    dummy_seed: int | None = None,
) -> None:
    """Load a target and serve captures until SIGTERM or SIGINT.

    Args:
        target: folder of the model.
        spec: the capture contract.
        store: where features go; this process gives it its `capacity_bytes`.
        host: interface to bind to.
        port: where to listen.
        device: where the model runs.
        dummy_seed: makes random weights from this seed instead of reading any.

    Raises:
        ValueError: if the target cannot be captured under the contract.
        StoreError: if the store cannot be reached.
        OSError: if the port is in use.
    """
    with (
        closing(HFTarget(target, spec, device, dummy_seed=dummy_seed)) as model,
        closing(open_store(store, contribute=True)) as objects,
        ReferenceServer(model, objects, host, port) as server,
    ):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        print(f"capturing {spec.method} features of {target} on {host}:{port}", flush=True)
        server.serve_forever()


class ReferenceServer(ThreadingHTTPServer):
    """Listens from its construction; `serve_forever` answers.

    Args:
        target: what captures; its spec is the contract.
        store: where features go.
        host: interface to bind to.
        port: where to listen; 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, target: HFTarget, store: FeatureStore, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.spec, self._target = target.spec, target
        self._spec_hash = spec_hash(target.spec)
        self._sink = Sink(store, self._spec_hash, feature_width(target.spec), target.spec.dtype)
        self._one_at_a_time = threading.Lock()

    def server_close(self) -> None:
        """Stop listening, and write what was captured."""
        super().server_close()
        self._sink.close()

    def accept(self, body: Any) -> CaptureRequest:
        """A request that this server can carry out.

        Raises:
            ValueError: saying why it cannot.
        """
        request = CaptureRequest.from_json(body)
        if request.spec_hash != self._spec_hash:
            raise ValueError(
                f"sample {request.sample_id!r} is asked for under the contract {request.spec_hash:.12}; "
                f"required: {self._spec_hash:.12}, this server's"
            )
        if (highest := max(request.input_ids)) >= self.spec.vocab_size:
            raise ValueError(
                f"sample {request.sample_id!r} holds token {highest}; required: below {self.spec.vocab_size}"
            )
        return request

    def capture(self, request: CaptureRequest) -> FeatureRef:
        """Capture a request; returns once its features can be read.

        Raises:
            RuntimeError, ValueError: what kept the target from it, or the store.
        """
        ids = np.array(request.input_ids, dtype=np.int32)
        row = PromptRow(request.sample_id, ids, np.ones(len(ids), dtype=bool))
        capture = self._sink.open(request.key, request.sample_id, len(ids))
        try:
            with self._one_at_a_time:
                batch = self._target.capture([row])
                parts = [batch.hidden] if batch.last_hidden is None else [batch.hidden, batch.last_hidden]
                capture.add(torch.cat(parts, dim=1), 0)
        except BaseException:
            capture.drop()
            raise
        outcome: Future[Outcome] = Future()
        capture.finish(outcome.set_result)
        result = outcome.result()
        if isinstance(result, Exception):
            raise RuntimeError(f"sample {request.sample_id!r}: {result}") from result
        return result


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    @property
    def _captures(self) -> ReferenceServer:
        assert isinstance(self.server, ReferenceServer)
        return self.server

    def do_GET(self) -> None:
        """Tell that the server is up, or what it captures."""
        answers = {
            "/health": {},
            "/server_info": {FIELD: ServerDescription.of(self._captures.spec).to_json()},
        }
        if self.path in answers:
            self._answer(200, answers[self.path])
        else:
            self._answer(404, error_json(f"there is no {self.path}"))

    def do_POST(self) -> None:
        """Capture one sample."""
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/generate":
            return self._answer(404, error_json(f"there is no {self.path}"))
        try:
            request = self._captures.accept(json.loads(text))
        except ValueError as error:
            return self._answer(400, error_json(str(error)))
        try:
            answer = answer_json(self._captures.capture(request))
        except (RuntimeError, ValueError) as error:
            return self._answer(500, error_json(str(error)))
        self._answer(200, answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each request would bury what matters."""

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
