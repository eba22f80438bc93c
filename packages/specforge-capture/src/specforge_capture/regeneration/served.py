"""Answers of SGLang servers: what `DecodingBatch` is for a model in this process, over HTTP.

Each server has as many threads as it decodes sequences; they take requests from one queue, so that a server
that is faster, or has the shorter answers, takes more of them.
"""

import queue
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerClient, ServerDown
from specforge_capture.targets.batch import Answer, Request
from specforge_capture.targets.sampling import Sampling
from specforge_config.target import TargetShape, target_revision

_LOOK_SECONDS = 1.0
"""How often a caller gets to show its progress, whether an answer came or not."""


@dataclass(frozen=True)
class Served:
    """What a server decodes with."""

    version: str
    """Of SGLang."""
    model_path: str
    dtype: str
    """Element type of the weights; `auto` for the checkpoint's."""


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
            return Served(*(body[name] for name in ("version", "model_path", "dtype")))
        except (KeyError, TypeError):
            raise RequestRefused(
                f"{self.url}: its information is {body!r:.200}; required: that of an SGLang server"
            ) from None

    def require(self, target: str, shape: TargetShape, dtype: str) -> Served:
        """Check that the server decodes with a target, as far as its description tells: a folder is compared
        if this machine has it too.

        Raises:
            ValueError: naming what differs.
        """
        served = self.describe()
        found = shape.dtype if served.dtype == "auto" else served.dtype
        if found != dtype:
            raise ValueError(
                f"{self.url} computes in {found}, required {dtype}: set target.dtype, or start it with "
                f"--dtype {dtype}"
            )
        try:
            other = target_revision(served.model_path)
        except OSError:
            return served
        if other != target_revision(target):
            raise ValueError(
                f"{self.url} serves {served.model_path}, another model than target.path, {target}; required: "
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
        }
        if sampling.temperature > 0:
            # Read under --enable-deterministic-inference alone; else a server draws as it likes.
            sequence = np.random.SeedSequence([sampling.seed, *request.key])
            parameters["sampling_seed"] = int(sequence.generate_state(1)[0])
        body = self.ask("POST", "/generate", {"input_ids": request.prompt, "sampling_params": parameters})
        try:
            tokens, reason = body["output_ids"], body["meta_info"]["finish_reason"]
            kind = reason["type"]
        except (KeyError, TypeError):
            raise RequestFailed(
                f"{self.url}: the answer is {body!r:.200}; required: output_ids and a finish_reason"
            ) from None
        if kind not in ("stop", "length") or not tokens:
            raise RequestFailed(f"{self.url}: the answer ended after {len(tokens)} tokens: {reason!r:.200}")
        return Answer(tokens, kind)


class ServedBatch:
    """Answers requests, up to `slots` at a time on each server.

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
        self._slots = slots * len(clients)
        self._stop_ids, self._sampling = stop_ids, sampling
        self._asked: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[tuple[Request, Answer] | Exception] = queue.SimpleQueue()
        # Daemons: what they wait for is of no use to a process that ends.
        for client in clients:
            for _ in range(slots):
                threading.Thread(target=self._work, args=(client,), daemon=True).start()

    @property
    def free(self) -> int:
        """Requests that may be admitted."""
        return self._slots - self.running

    def admit(self, requests: Sequence[Request]) -> None:
        """Have at most `free` requests answered."""
        self.running += len(requests)
        for request in requests:
            self._asked.put(request)

    def advance(self) -> list[tuple[Request, Answer]]:
        """The answers that came; none after a while without any.

        Raises:
            ServerDown: if a server does not answer.
            RequestFailed: if one failed a request.
            RequestRefused: if one will never answer a prompt.
        """
        answers: list[tuple[Request, Answer]] = []
        try:
            came = self._answered.get(timeout=_LOOK_SECONDS)
            while not isinstance(came, Exception):
                answers.append(came)
                came = self._answered.get_nowait()
            if not answers:
                raise came
            self._answered.put(came)  # told by the next call, so that no answer is lost
        except queue.Empty:
            pass
        self.running -= len(answers)
        return answers

    def _work(self, client: AnswerClient) -> None:
        while True:
            request = self._asked.get()
            try:
                self._answered.put((request, client.answer(request, self._stop_ids, self._sampling)))
            except (ServerDown, RequestFailed, RequestRefused) as error:
                self._answered.put(error)
