"""Answers of SGLang servers: what `DecodingBatch` is for a model in this process, over HTTP.

Each server has as many threads as it decodes sequences; they take requests from one queue, so that a server
that is faster, or has the shorter answers, takes more of them.
"""

import logging
import queue
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerClient, ServerDown
from specforge_capture.targets.batch import Answer, Request
from specforge_capture.targets.sampling import Sampling
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape, target_revision

log = logging.getLogger(__name__)
PROBE_SECONDS = 60.0
"""How long a server may take to describe itself."""
_LOOK_SECONDS = 1.0
"""How often a caller gets to show its progress, whether an answer came or not."""
_PAUSES_SECONDS = (1.0, 10.0)
"""Before a failed request is asked again."""
_NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""What a server's own defaults would put otherwise."""
_SPELLINGS = {"half": "float16", "float": "float32"}


@dataclass(frozen=True)
class Served:
    """What a server decodes with."""

    version: str
    """Of SGLang."""
    model_path: str
    dtype: str
    """Element type of the weights; `auto` for SGLang's choice."""
    max_req_input_len: int
    """Tokens of the longest prompt that still gets an answer."""


class AnswerClient(ServerClient):
    """Asks one SGLang server for answers."""

    def describe(self) -> Served:
        """What the server decodes with.

        Raises:
            ServerDown: if it does not answer.
            RequestFailed: if it answers with something else.
            RequestRefused: if it is no SGLang server.
        """
        body = self.ask("GET", "/server_info")
        try:
            return Served(*(body[name] for name in Served.__dataclass_fields__))
        except (KeyError, TypeError):
            raise RequestRefused(
                f"{self.url}: its information is {body!r:.200}; required: that of an SGLang server"
            ) from None

    def require(self, config: RunConfig) -> Served:
        """Check that the server decodes with a run's target, as far as its description tells: the model is
        compared where this machine has the server's folder too.

        Raises:
            ValueError: naming what differs.
        """
        served, target, longest = self.describe(), config.target, config.data.max_length
        shape = read_target_shape(target.path)
        dtype, found = target.element_type(shape), _SPELLINGS.get(served.dtype, served.dtype)
        if found == "auto":  # SGLang takes the checkpoint's, but halves float32
            found = shape.dtype if shape.dtype != "float32" else "half precision"
        if found != dtype:
            raise ValueError(
                f"{self.url} computes in {found}, required {dtype}: set target.dtype, or start it with "
                f"--dtype {dtype}"
            )
        if served.max_req_input_len < longest:
            raise ValueError(
                f"{self.url} takes {served.max_req_input_len} tokens, required {longest}: lower "
                "data.max_length, or start it with a longer --context-length or a larger token pool "
                "(engine.context_length and engine.max_total_tokens, where it is started for you)"
            )
        folder, here = Path(served.model_path), target_revision(target.path)
        if folder.is_absolute() and folder.is_dir() and target_revision(folder) != here:
            raise ValueError(
                f"{self.url} serves {folder}, another model than target.path, {target.path}; required: "
                "servers of the target"
            )
        return served

    def answer(self, request: Request, stop_ids: Collection[int], sampling: Sampling) -> Answer:
        """One answer; returns once it is whole.

        Raises:
            ServerDown: if the server does not answer.
            RequestFailed: if it gave up, or its answer lacks what is needed.
            RequestRefused: if it will never answer this prompt, such as one longer than its context.
        """
        parameters: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_new_tokens": request.limit,
            "stop_token_ids": sorted(stop_ids),
            **_NEUTRAL,
        }
        if sampling.temperature > 0:
            # Read under --enable-deterministic-inference alone; else a server draws as it likes.
            sequence = np.random.SeedSequence([sampling.seed, *request.key])
            parameters["sampling_seed"] = int(sequence.generate_state(1)[0])
        body = self.ask("POST", "/generate", {"input_ids": request.prompt, "sampling_params": parameters})
        try:
            tokens, reason = list(body["output_ids"]), body["meta_info"]["finish_reason"]
            kind, matched = reason["type"], reason.get("matched")
        except (KeyError, TypeError):
            raise RequestFailed(
                f"{self.url}: the answer is {body!r:.200}; required: output_ids and a finish_reason"
            ) from None
        if kind == "length" and tokens and tokens[-1] in stop_ids:
            kind, matched = "stop", tokens[-1]  # 0.5.14 looks at the length first
        # A stop that no token made is one that SGLang makes of logits that are no numbers.
        whole = {"stop": isinstance(matched, int), "length": len(tokens) == request.limit}
        if not (tokens and whole.get(kind)):
            raise RequestFailed(
                f"{self.url}: the answer ended after {len(tokens)} of {request.limit} tokens: {reason!r:.200}"
            )
        return Answer(tokens, "stop" if kind == "stop" else "length")


class ServedBatch:
    """Answers requests, up to `slots` at a time on each server. `close` ends its threads.

    A server that does not answer is left out, and its requests are given to the others. A failed request is
    asked again.

    Args:
        clients: the servers.
        stop_ids: tokens that end an answer, beside those that a server knows itself.
        slots: requests that a server has at once.
        sampling: how tokens are chosen.
    """

    def __init__(
        self, clients: Sequence[AnswerClient], stop_ids: Collection[int], slots: int, sampling: Sampling
    ) -> None:
        self.running = 0
        """Requests that are being answered."""
        self.unfinished = 0
        """Tokens so far of the answers that are being written; an answer is seen when it is whole."""
        self._slots = slots
        self._stop_ids, self._sampling = frozenset(stop_ids), sampling
        self._left = {client.url for client in clients}
        self._lock = threading.Lock()  # of those that are left
        self._asked: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[Request, Answer] | Exception] = queue.SimpleQueue()
        self._failure: Exception | None = None
        # Daemons: what they wait for is of no use to a process that ends.
        self._threads = [
            threading.Thread(target=self._work, args=(client,), daemon=True)
            for client in clients
            for _ in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def free(self) -> int:
        """Requests that may be admitted."""
        return max(0, self._slots * len(self._left) - self.running)

    def admit(self, requests: Sequence[Request]) -> None:
        """Have at most `free` requests answered."""
        self.running += len(requests)
        for request in requests:
            self._asked.put(request)

    def advance(self) -> list[tuple[Request, Answer]]:
        """The answers that came; none after a while without any. A failure is told once no answer is left.

        Raises:
            ServerDown: if no server answers.
            RequestFailed: if one failed a request again and again.
            RequestRefused: if one will never answer a prompt.
        """
        answers: list[tuple[Request, Answer]] = []
        with suppress(queue.Empty):
            came = self._answered.get(timeout=_LOOK_SECONDS)
            while True:
                if not isinstance(came, Exception):
                    answers.append(came)
                elif self._failure is None:
                    self._failure = came
                came = self._answered.get_nowait()
        if self._failure is not None and not answers:
            raise self._failure
        self.running -= len(answers)
        return answers

    def close(self) -> None:
        """Let the threads end, each behind what it waits for."""
        for _ in self._threads:
            self._asked.put(None)

    def _work(self, client: AnswerClient) -> None:
        while (request := self._asked.get()) is not None:
            try:
                self._answered.put((request, self._answer(client, request)))
            except ServerDown as error:
                if self._leave_out(client, error):
                    self._asked.put(request)
                else:
                    self._answered.put(error)
                return
            except Exception as error:  # told by the thread that waits for answers
                self._answered.put(error)

    def _answer(self, client: AnswerClient, request: Request) -> Answer:
        for pause in (*_PAUSES_SECONDS, None):
            try:
                return client.answer(request, self._stop_ids, self._sampling)
            except RequestFailed as error:
                if pause is None:
                    raise RequestFailed(f"{_name(request)}: {error}") from error
                time.sleep(pause)
            except RequestRefused as error:
                raise RequestRefused(f"{_name(request)}: {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def _leave_out(self, client: AnswerClient, error: ServerDown) -> bool:
        """Whether other servers are left without this one."""
        with self._lock:
            if client.url in self._left and len(self._left) > 1:
                log.warning("%s; going on with %d servers", error, len(self._left) - 1)
            self._left.discard(client.url)
            return bool(self._left)


def _name(request: Request) -> str:
    row, turn = request.key
    return f"row {row + 1} of the prompts, answer {turn + 1}"
