"""The capture servers of a run, each with as many threads as it has requests in flight.

Threads take samples in the plan's order, and put what came of them into a queue; what follows from it is
decided elsewhere. A server that cannot be reached, or that fails one capture after the other, is set aside:
its threads take no sample for a while, and not before it answers again, with the right contract. The while
grows until a capture succeeds.

Invariant: a sample is not given again to a server that failed it while another one may capture it. A server
that answers everything, and wrongly, so costs each sample one attempt at most.
"""

import bisect
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
from specforge_capture.ledger import Entry
from specforge_capture.refs import FeatureRef, feature_width
from specforge_capture.targets.base import PromptRow
from specforge_capture.wire import CaptureClient
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.producer import ProducerConfig

LONGEST_BACKOFF_SECONDS = 30.0
_HEALTH_SECONDS = 60.0
_FAILURES_IN_A_ROW = 3
"""Captures that a server fails in a row before it is set aside: one may be its sample's fault."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Question:
    """A sample to capture."""

    entry: Entry
    row: PromptRow
    tried: frozenset[str] = frozenset()
    """Addresses of servers that failed it."""

    @property
    def name(self) -> str:
        """The sample, as messages name it."""
        return f"sample {self.row.sample_id} (epoch {self.entry.epoch}, position {self.entry.position})"

    def __lt__(self, other: "Question") -> bool:
        """Whether it comes first in the plan."""
        return (self.entry.step, self.entry.position) < (other.entry.step, other.entry.position)


@dataclass(frozen=True)
class Answer:
    """What came of a sample: the ref of its features, or why there are none."""

    question: Question
    server: str
    """Address of the server that it comes from."""
    result: FeatureRef | ServerDown | RequestFailed | RequestRefused


def backoff(first: float, failures: int) -> float:
    """Seconds to wait after a number of failures: `first`, doubled with each, half a minute at most."""
    return min(first * 2 ** min(failures - 1, 16), max(first, LONGEST_BACKOFF_SECONDS))


class Server:
    """One server, and whether it is set aside. It is at first, so that its contract is checked before its
    first sample."""

    def __init__(self, url: str, config: ProducerConfig, spec: CaptureSpec) -> None:
        self.url = url
        self.why = "it was not reached yet"
        """Why it was set aside last."""
        self._client = CaptureClient(url, config.request_timeout_seconds)
        self._health = CaptureClient(url, min(config.request_timeout_seconds, _HEALTH_SECONDS))
        self._spec, self._hash = spec, spec_hash(spec)
        self._backoff, self._retry_at = config.backoff_seconds, 0.0
        self._failures = self._failed_captures = 0  # since the last capture that succeeded
        self._lock = threading.Lock()
        self.up = False
        """Whether it takes samples."""

    @property
    def promising(self) -> bool:
        """Whether it takes samples, or nobody has looked yet whether it does."""
        return self.up or self._retry_at == 0

    def usable(self) -> bool:
        """Whether it may be asked now; tries one that was set aside, if it is time and no other thread does.

        Raises:
            ValueError: if it captures under another contract, or nothing at all.
        """
        if self.up or not self._lock.acquire(blocking=False):
            return self.up
        try:
            if not self.up and time.monotonic() >= self._retry_at:
                self._try()
            return self.up
        finally:
            self._lock.release()

    def capture(self, question: Question) -> FeatureRef:
        """Have a sample captured.

        Raises:
            ServerDown: if the server is gone or too slow; it is set aside.
            RequestFailed: if this capture failed, or is not what was asked for; with several in a row the
                server is set aside.
            RequestRefused: if the server will never capture it.
        """
        try:
            ref = self._capture(question)
        except (ServerDown, RequestFailed) as error:
            with self._lock:
                self._failed_captures += 1
                lasting = isinstance(error, ServerDown) or self._failed_captures >= _FAILURES_IN_A_ROW
                if self.up and lasting:  # else another request of the same time has set it aside
                    self._set_aside(error)
            raise
        with self._lock:
            self._failures = self._failed_captures = 0
        return ref

    def _capture(self, question: Question) -> FeatureRef:
        entry, row = question.entry, question.row
        ref = self._client.capture(entry.key, row.sample_id, row.input_ids.tolist(), self._hash)
        required = feature_width(self._spec), self._spec.dtype
        if (ref.width, ref.dtype) != required:
            raise RequestFailed(
                f"{self.url}: rows of {ref.width} elements of {ref.dtype} captured, required {required[0]} "
                f"of {required[1]}"
            )
        return ref

    def _try(self) -> None:
        try:
            description = self._health.describe()
        except (ServerDown, RequestFailed) as error:
            self._set_aside(error)
            return
        try:
            description.require(self._spec)
        except ValueError as error:
            raise ValueError(f"{self.url}: {error}") from None
        self.up = True

    def _set_aside(self, error: Exception) -> None:
        self.up, self.why = False, str(error)
        self._failures += 1
        self._retry_at = time.monotonic() + backoff(self._backoff, self._failures)


class ServerPool:
    """The threads of all servers. `close` ends them."""

    def __init__(self, urls: Sequence[str], config: ProducerConfig, spec: CaptureSpec) -> None:
        if not urls:
            raise ValueError("no capture server is given; required: at least one address, http://host:port")
        self.servers = [Server(url, config, spec) for url in urls]
        self._outage_seconds = config.outage_seconds
        self._up_at = time.monotonic()
        self._asked: list[Question] = []  # in the plan's order
        self._lock = threading.Lock()  # of the list
        self._answers: queue.Queue[Answer | ValueError] = queue.Queue()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(server,), name=f"{server.url} #{slot}", daemon=True)
            for server in self.servers
            for slot in range(config.in_flight)
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, question: Question) -> None:
        """Have a sample captured; its answer comes by `answer`."""
        with self._lock:
            bisect.insort(self._asked, question)

    def others(self, tried: frozenset[str]) -> bool:
        """Whether a server may be asked that is not among `tried`."""
        return any(server.promising and server.url not in tried for server in self.servers)

    def answer(self, seconds: float) -> Answer | None:
        """The next answer; None if there is none within `seconds`.

        Raises:
            ValueError: if a server captures under another contract.
            ServerDown: if all servers have been down for too long.
        """
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            self._require_up()
            return None
        if isinstance(found, ValueError):
            raise found
        return found

    def withdraw(self) -> list[Question]:
        """Take back what no thread works on yet."""
        with self._lock:
            taken, self._asked = self._asked, []
        return taken

    def close(self, deadline: Callable[[], float]) -> None:
        """End the threads; waits for requests in flight, whose answers are dropped.

        Args:
            deadline: until when, on the clock `time.monotonic`; asked again and again, as it may come nearer.
        """
        self._stopping.set()
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline():
                thread.join(_POLL_SECONDS)

    def _require_up(self) -> None:
        now = time.monotonic()
        if any(server.up for server in self.servers):
            self._up_at = now
        elif now - self._up_at > self._outage_seconds:
            rows = "".join(f"\n  {server.url}: {server.why}" for server in self.servers)
            raise ServerDown(f"no capture server can be used for {now - self._up_at:.0f} s:{rows}")

    def _next(self, server: Server) -> Question | None:
        """The first sample that a server may capture."""
        with self._lock:
            for place, question in enumerate(self._asked):
                if server.url not in question.tried or not self.others(question.tried):
                    return self._asked.pop(place)
        return None

    def _work(self, server: Server) -> None:
        while not self._stopping.is_set():
            try:
                usable = server.usable()
            except ValueError as error:  # for the thread that reads answers
                self._answers.put(error)
                return
            if not usable or (question := self._next(server)) is None:
                self._stopping.wait(_POLL_SECONDS)
                continue
            try:
                result = server.capture(question)
            except (ServerDown, RequestFailed, RequestRefused) as error:
                result = error
            self._answers.put(Answer(question, server.url, result))
