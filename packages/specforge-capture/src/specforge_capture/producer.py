"""The producer: has the prompts of a plan captured, in its order, ahead of the trainer.

One thread, the producer's own, decides: it plans windows in the ledger, asks for their samples as far as the
watermarks allow, commits a window once all of it is captured, and frees what the trainer acknowledged. The
threads of `ServerPool` only carry requests.

Invariant: whatever may lie in the store is known to the ledger or to this thread, by the prefix of its key.
When the producer ends, on whatever path, it removes the objects of its run.
"""

import heapq
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from specforge_capture.http_client import RequestRefused
from specforge_capture.ledger import Entry, Ledger, Session, SessionChanged, read_identity
from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.refs import ELEMENT_BYTES, FeatureRef, feature_width
from specforge_capture.roles import is_taken
from specforge_capture.servers import Answer, Question, ServerPool, backoff
from specforge_capture.stores.base import FeatureStore, StoreError, open_store
from specforge_capture.watermarks import Held, largest_window
from specforge_config.features import CaptureSpec
from specforge_config.producer import ProducerConfig
from specforge_config.store import FileStore, MooncakeStore

_POLL_SECONDS = 0.05
_HASTY_SECONDS = 5.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Produced:
    """What a producer did."""

    captured: int
    """Samples captured."""
    retried: int
    """Requests that were repeated."""
    stopped: bool
    """Whether it ended on request, before the trainer did."""


def run_producer(
    config: ProducerConfig,
    servers: Sequence[str],
    store: MooncakeStore | FileStore,
    prompts: PromptSet,
    plan: PromptPlan,
    spec: CaptureSpec,
    folder: Path,
    tell: Tell = print,
) -> Produced:
    """The producer's whole life, for its process's main thread: SIGTERM and SIGINT stop it.

    It waits for the trainer's rank 0 to open the ledger in `folder`, captures what the trainer needs, and
    ends once everything is trained and freed. A first signal stops capturing and ends the stream after the
    whole windows that were captured, within `drain_seconds` in all; a second one ends it within seconds. The
    run's objects are freed on every path, after those waits; what a server stores after that is left to the
    next start, or to `sweep`.

    Args:
        config: how to ask, and how far ahead.
        servers: `http://host:port` of each capture server.
        store: where the servers put features.
        prompts: the prompt set, as the trainer has it.
        plan: the order of prompts, as the trainer has it.
        spec: the capture contract, as the trainer has it.
        folder: the run's folder, on the node of the trainer's rank 0.
        tell: takes lines for the log.

    Raises:
        ValueError: for a server or a ledger of another run, marks that hold no window, or a prompt that a
            server refuses.
        ServerDown, StoreError, TimeoutError: if servers, the store or the trainer are gone for longer than
            `config` allows.
        RuntimeError: if a sample failed all retries.
        The trainer's ranks raise the same message.
    """
    with (
        closing(Ledger(folder, plan, spec, "producer")) as ledger,
        closing(open_store(store, contribute=False)) as objects,
    ):
        producer = Producer(config, servers, objects, ledger, prompts, plan, spec, tell)
        previous = {n: signal.signal(n, producer.stop) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            return producer.run()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def sweep(folder: Path, store: FeatureStore) -> int:
    """Free what a run left in a store, where its producer was killed; no trainer or producer may be running.

    Returns:
        How many objects there were.

    Raises:
        ValueError: if a trainer or producer is running.
    """
    identity = read_identity(folder)
    if identity is None:
        return 0
    for role in ("producer", "trainer"):
        if is_taken(folder, role):
            raise ValueError(f"{folder}: a {role} is running; required: end it first")
    return store.remove_prefix(f"{identity}.")


class Producer:
    """Serves the trainer's sessions, one after the other; see `run_producer`."""

    def __init__(
        self,
        config: ProducerConfig,
        servers: Sequence[str],
        store: FeatureStore,
        ledger: Ledger,
        prompts: PromptSet,
        plan: PromptPlan,
        spec: CaptureSpec,
        tell: Tell = print,
    ) -> None:
        self.config, self.store, self.ledger, self.prompts, self.plan = config, store, ledger, prompts, plan
        self.tell = tell
        self.row_bytes = feature_width(spec) * ELEMENT_BYTES[spec.dtype]
        window_bytes = largest_window(plan, prompts.lengths()) * self.row_bytes
        self.marks = config.watermarks(plan.global_batch, window_bytes)
        self.captured = self.retried = self.stops = 0
        self.leave_at = math.inf
        """When waiting ends, whatever for, on the clock `time.monotonic`; finite once the end has begun."""
        self._servers, self._spec = tuple(servers), spec
        self._trainer_seen = time.monotonic()

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask it to stop, from any thread or as a signal's handler; once to drain, twice to leave soon."""
        self.stops += 1
        self._leave_within(self.config.drain_seconds if self.stops == 1 else _HASTY_SECONDS)

    def run(self) -> Produced:
        """Serve sessions until one is closed, or until it is stopped."""
        pool = ServerPool(self._servers, self.config, self._spec)
        try:
            while (session := self._next_session(pool)) is not None:
                work = _Work(self, pool, session)
                try:
                    work.run()
                    break
                except SessionChanged:
                    self.tell("the trainer has started anew; what was captured for it before is freed")
                    pool.withdraw()
        except BaseException as error:
            self.ledger.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            pool.withdraw()
            self._leave_within(self.config.drain_seconds)
            pool.close(lambda: self.leave_at)
            self._free_all()
        return Produced(self.captured, self.retried, self.stops > 0)

    def trainer_missing(self) -> bool:
        """Whether no trainer is there now.

        Raises:
            TimeoutError: if there was none for longer than `trainer_seconds`.
        """
        now = time.monotonic()
        if self.ledger.present("trainer"):
            self._trainer_seen = now
            return False
        if now - self._trainer_seen > self.config.trainer_seconds:
            raise TimeoutError(
                f"no trainer has been running on {self.ledger.path} for {now - self._trainer_seen:.0f} s: "
                "start it on this node, or raise deployment.producer.trainer_seconds"
            )
        return True

    def _next_session(self, pool: ServerPool) -> Session | None:
        """Wait for a trainer that takes features; None if a stop comes first."""
        while not self.stops:
            missing = self.trainer_missing()
            state = self.ledger.state()
            if state.open and not missing:
                return self.ledger.attend()
            late = pool.answer(_POLL_SECONDS)
            if late is not None:
                self.store.remove_prefix(f"{late.question.entry.key}/")
        return None

    def _leave_within(self, seconds: float) -> None:
        self.leave_at = min(self.leave_at, time.monotonic() + seconds)

    def _free_all(self) -> None:
        try:
            self.store.remove_prefix(f"{self.ledger.identity}.")
        except StoreError as error:  # the run's outcome is told already
            self.tell(f"objects of the run may be left in the store: {error}")


class _Work:
    """What a producer does for one session of the trainer."""

    def __init__(self, producer: Producer, pool: ServerPool, session: Session) -> None:
        self._producer, self._pool, self._session = producer, pool, session
        self._ledger, self._store = producer.ledger, producer.store
        self._tell, self._config = producer.tell, producer.config
        self._held = Held(producer.marks, session.acknowledged)
        self._step = session.acknowledged  # the last window that was planned
        self._next: list[Entry] = []  # of that window, to be asked for, the first one last
        self._active: set[tuple[int, int]] = set()  # asked for, or waiting to be asked again
        self._again: list[tuple[float, Question]] = []  # a heap of those that wait
        self._failures: Counter[tuple[int, int]] = Counter()
        self._windows: dict[int, _Window] = {}  # those that are not committed yet
        self._freed: int | None = None  # the last step whose objects were removed
        self._withdrawn = False  # what no server works on, after a stop request

    def run(self) -> None:
        """Until the trainer closes the session, or a stop request is carried out.

        Raises:
            SessionChanged: if the trainer has started anew.
        """
        if self._ledger.untouched():  # what lies in the store is of earlier sessions
            self._store.remove_prefix(f"{self._ledger.identity}.")
        while True:
            answer = self._pool.answer(_POLL_SECONDS)
            if answer is not None:
                self._take(answer)
            state = self._ledger.state()
            if state.number != self._session.number:
                raise SessionChanged
            missing = self._producer.trainer_missing()
            self._free(state)
            if not state.open or self._drained(state, missing):
                return
            self._ask_again()
            if not self._producer.stops:
                self._ask_ahead(state)

    def _take(self, answer: Answer) -> None:
        """Commit what an answer completes, or have a failed sample asked for again."""
        entry, result = answer.question.entry, answer.result
        stale = not entry.key.startswith(f"{self._ledger.identity}.{self._session.number}/")
        if stale or entry.step > self._step:  # of an earlier session, or behind the stream's end
            self._store.remove_prefix(f"{entry.key}/")
        elif isinstance(result, FeatureRef):
            self._producer.captured += 1
            self._active.discard(entry.task)
            window = self._windows.get(entry.step)
            if window is None:  # it was lost after its window had been committed
                self._commit({entry.task: result})
            elif window.add(entry.task, result):
                self._commit(window.refs)
                del self._windows[entry.step]
        else:
            self._retry(answer.question, answer.server, result)

    def _commit(self, refs: dict[tuple[int, int], FeatureRef]) -> None:
        for twice in self._ledger.commit(refs.values(), refs.keys()):
            self._store.remove(twice.keys)

    def _retry(self, question: Question, server: str, error: Exception) -> None:
        """Have a failed sample asked for again: at once where a server is left that has not failed it, else
        after a wait, which counts."""
        entry, row, name = question.entry, question.row, question.name
        if isinstance(error, RequestRefused):
            raise ValueError(f"{name} of {len(row.input_ids)} tokens was refused: {error}") from error
        tried, due = question.tried | {server}, time.monotonic()
        if not self._pool.others(tried):
            failures, allowed = self._count_failure(entry)
            if failures > allowed:
                raise RuntimeError(
                    f"{name} could not be captured in {entry.attempt} attempts, deployment.producer.retries "
                    f"is {allowed}; the last one: {error}"
                ) from error
            tried, due = frozenset(), due + backoff(self._config.backoff_seconds, failures)
        self._tell(f"{name}: attempt {entry.attempt} failed: {error}")
        self._producer.retried += 1
        fresh = self._ledger.retry(entry.task)
        self._store.remove_prefix(f"{entry.key}/")
        heapq.heappush(self._again, (due, Question(fresh, row, tried)))

    def _count_failure(self, entry: Entry) -> tuple[int, int]:
        """Failures of a sample, with one more, and how many are allowed."""
        self._failures[entry.task] += 1
        return self._failures[entry.task], self._config.retries

    def _ask_again(self) -> None:
        """Ask for what waited long enough, and for what the trainer lost."""
        while self._again and self._again[0][0] <= time.monotonic():
            self._pool.ask(heapq.heappop(self._again)[1])
        whole = min(self._windows, default=self._step + 1) - 1
        for entry in self._ledger.planned(whole):
            if entry.task not in self._active:
                self._ask_lost(entry)

    def _ask_lost(self, entry: Entry) -> None:
        question = self._question(entry)
        failures, allowed = self._count_failure(entry)
        if failures > allowed:
            raise RuntimeError(
                f"{question.name}: its features were lost or changed {failures} times after their capture, "
                f"deployment.producer.retries is {allowed}: look at the logs of the store and the servers"
            )
        self._tell(f"{question.name}: its features were lost; it is captured anew")
        self._producer.retried += 1
        self._store.remove_prefix(entry.prefix)
        self._active.add(entry.task)
        self._pool.ask(question)

    def _ask_ahead(self, state: Session) -> None:
        """Ask for samples in the plan's order, as far as the marks allow."""
        while self._next or self._plan_next(state):
            entry = self._next[-1]
            question = self._question(entry)
            nbytes = len(question.row.input_ids) * self._producer.row_bytes
            if not self._held.admits(entry.step, nbytes):
                return
            self._held.add(entry.step, nbytes)
            self._next.pop()
            self._active.add(entry.task)
            self._pool.ask(question)

    def _plan_next(self, state: Session) -> bool:
        """Plan the next window; False behind the last one. Of a window that an earlier producer of this
        session worked on, what is committed counts as held."""
        while self._step < state.total_steps:
            self._step += 1
            tasks = self._producer.plan.window(self._step - 1)
            entries = self._ledger.plan_window(self._step, tasks)
            wanted = {entry.task for entry in entries}
            for task in tasks:
                if (task.epoch, task.position) not in wanted:
                    row = self._producer.prompts.row(task.row)
                    self._held.add(self._step, len(row.input_ids) * self._producer.row_bytes)
            for entry in entries:
                if entry.attempt > 1:
                    self._store.remove_prefix(entry.prefix)
            if entries:
                self._windows[self._step] = _Window(wanted)
                self._next = entries[::-1]
                return True
        if state.ended is None and not self._windows:
            self._ledger.end(state.total_steps)
        return False

    def _question(self, entry: Entry) -> Question:
        window = self._producer.plan.window(entry.step - 1)
        task = window[entry.position - window[0].position]
        return Question(entry, self._producer.prompts.row(task.row, entry.task))

    def _free(self, state: Session) -> None:
        """Remove the objects of acknowledged windows."""
        if state.acknowledged == self._freed:
            return
        entries = self._ledger.acknowledged()
        self._store.remove([key for entry in entries if entry.ref for key in entry.ref.keys])
        for entry in entries:
            if entry.attempt > 1:  # a server may have finished an attempt that was given up
                self._store.remove_prefix(entry.prefix)
        self._ledger.free(entries)
        self._held.release(state.acknowledged)
        self._freed = state.acknowledged

    def _drained(self, state: Session, trainer_missing: bool) -> bool:
        """Carry a stop request out: end the stream once nothing is in flight, then let the trainer finish.
        Of the seconds for both, requests in flight get one half at most."""
        stops, left = self._producer.stops, self._producer.leave_at - time.monotonic()
        if not stops:
            return False
        if not self._withdrawn:
            self._withdraw()
            self._withdrawn = True
        if state.ended is None and (not self._active or left < self._config.drain_seconds / 2 or stops > 1):
            self._end()
            return False
        return stops > 1 or trainer_missing or (state.ended is not None and left < 0)

    def _withdraw(self) -> None:
        """Take back what no server works on, except what the trainer waits for."""
        asked = self._pool.withdraw()
        waiting = asked + [question for _, question in self._again]
        self._active -= {q.entry.task for q in waiting if q.entry.step in self._windows}
        self._again = [pair for pair in self._again if pair[1].entry.step not in self._windows]
        heapq.heapify(self._again)
        for question in asked:
            if question.entry.step not in self._windows:
                self._pool.ask(question)

    def _end(self) -> None:
        """End the stream after the last whole window; samples of a window that was not filled are settled."""
        last = min(self._windows, default=self._step + 1) - 1
        partial = {task: ref for window in self._windows.values() for task, ref in window.refs.items()}
        self._ledger.end(last, partial)
        self._store.remove([key for ref in partial.values() for key in ref.keys])
        self._windows.clear()
        self._next.clear()
        self._step = last
        self._tell(
            f"stopped: features end after step {last}"
            + (f"; {len(partial)} samples of a window that was not filled are settled" if partial else "")
        )


class _Window:
    """The refs of a window, until all of it is captured."""

    def __init__(self, wanted: set[tuple[int, int]]) -> None:
        self.refs: dict[tuple[int, int], FeatureRef] = {}
        self._wanted = wanted

    def add(self, task: tuple[int, int], ref: FeatureRef) -> bool:
        """Add a sample; returns whether the window is whole."""
        self.refs[task] = ref
        return self.refs.keys() == self._wanted
