"""The ledger of a disaggregated run: what became of each planned sample, in one SQLite file of the run's
folder that the producer and the trainer's rank 0, on one node, both have open.

    planned -> committed -> dispatched -> acknowledged -> freed
                  \\____________\\_________-> settled (captured, never trained, freed)

A sample is planned before it is asked for, and committed with the ref of its features, a window at a time. An
optimizer step acknowledges its window. Objects are freed only once that is durable.

Invariants:
- The trainer's checkpoint decides. Each start of the trainer opens a new *session*, which forgets everything
  behind that checkpoint; all of it is captured anew. So in the lineage of checkpoints each sample is trained
  once, wherever a process was killed.
- A writer of an earlier session changes nothing (`SessionChanged`), and takes back what it captured.
- The key of every object that was ever asked for begins with the run's identity, then the session and the
  task: whatever a killed process left is found by its prefix.
- A task has at most one committed ref. A second answer is handed back, to be freed.

Commits that others act upon are synced to the disk (synchronous=FULL); a killed process loses none of the
others either.
"""

import json
import sqlite3
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from specforge_capture.prompts.plan import PromptPlan, Task
from specforge_capture.refs import FeatureRef
from specforge_capture.roles import Role, alone, is_taken, take
from specforge_config.features import CaptureSpec

FORMAT = 1
FILE = "ledger.sqlite"
_BUSY_SECONDS = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS run (
    one INTEGER PRIMARY KEY CHECK (one = 1), format INTEGER, identity TEXT, plan TEXT, capture TEXT,
    session INTEGER, open INTEGER, start_step INTEGER, total_steps INTEGER, acknowledged INTEGER,
    ended INTEGER, failure TEXT
);
CREATE TABLE IF NOT EXISTS tasks (
    epoch INTEGER, position INTEGER, step INTEGER, state TEXT, attempt INTEGER, key TEXT, ref TEXT,
    PRIMARY KEY (epoch, position)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tasks_by_step ON tasks (step);
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state, step);
"""


class State(StrEnum):
    """Where a planned sample stands."""

    PLANNED = "planned"
    COMMITTED = "committed"
    DISPATCHED = "dispatched"
    ACKNOWLEDGED = "acknowledged"
    FREED = "freed"
    SETTLED = "settled"


class SessionChanged(RuntimeError):
    """The trainer has started anew; what this session was about is forgotten."""


@dataclass(frozen=True)
class Session:
    """Where a run stands between producer and trainer."""

    number: int
    """Starts of the trainer so far; 0 before the first."""
    open: bool
    """Whether the trainer still takes features."""
    start_step: int
    """Optimizer steps of the checkpoint that the trainer started from."""
    total_steps: int
    """Optimizer steps at which it ends."""
    acknowledged: int
    """The last step whose window the trainer acknowledged."""
    ended: int | None
    """The last step that the producer has features for, once it captures no more."""
    failure: str | None
    """What ended the producer."""


@dataclass(frozen=True)
class Entry:
    """One sample of the ledger."""

    epoch: int
    position: int
    step: int
    attempt: int
    """How often it was asked for in this session."""
    key: str
    """Prefix of its newest attempt's objects."""
    ref: FeatureRef | None = None

    @property
    def task(self) -> tuple[int, int]:
        """(epoch, position): the task id."""
        return self.epoch, self.position

    @property
    def prefix(self) -> str:
        """Prefix of the objects of all its attempts."""
        return self.key.rpartition("-")[0] + "-"


@dataclass(frozen=True)
class Rewound:
    """What a new session found behind the trainer's checkpoint."""

    unfinished: int
    """Samples that were captured, and perhaps trained, after the checkpoint."""
    settled: int
    """Samples that an earlier end had settled: captured, freed and never trained."""


class Ledger:
    """One process's connection; used by one thread at a time.

    Args:
        folder: the run's folder.
        plan: the order of prompts.
        spec: the capture contract.
        role: who opens it; one process at a time has a role.

    Raises:
        ValueError: if the ledger is of another plan or contract, naming the difference, or the role is taken.
    """

    def __init__(self, folder: Path, plan: PromptPlan, spec: CaptureSpec, role: Role) -> None:
        self.path = folder / FILE
        self.window = plan.global_batch
        self.session = 0
        """The session that this process works for."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder):  # one that opens a session sees a producer with what it says, or neither
            self._lock = take(folder, role)
            self._db = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._set_up(plan, spec)
                if role == "producer":
                    self._forget_producer()
            except BaseException:
                self.close()
                raise

    def _set_up(self, plan: PromptPlan, spec: CaptureSpec) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(_SCHEMA)
        fresh = (
            FORMAT,
            uuid.uuid4().hex[:12],
            json.dumps(plan.record(), sort_keys=True),
            spec.model_dump_json(),
        )
        with self._write(durable=True, fenced=False):
            self._db.execute(
                "INSERT OR IGNORE INTO run VALUES (1, ?, ?, ?, ?, 0, 0, 0, 0, 0, NULL, NULL)", fresh
            )
        found = self._db.execute("SELECT format, identity, plan, capture FROM run").fetchone()
        if found[0] != FORMAT:
            raise ValueError(f"{self.path} has format {found[0]}, required {FORMAT}: set a new output_dir")
        self.identity: str = found[1]
        """Begins the keys of all objects of the run."""
        saved, asked = json.loads(found[2]), plan.record()
        if names := [name for name in {**saved, **asked} if saved.get(name) != asked.get(name)]:
            rows = "\n".join(
                f"  {n}: {asked.get(n)!r} (this run) != {saved.get(n)!r} (the ledger)" for n in names
            )
            raise ValueError(
                f"{self.path} belongs to another plan, so that samples would be repeated or skipped:\n"
                f"{rows}\nrestore these settings, or set output_dir to a new folder"
            )
        CaptureSpec.model_validate_json(found[3]).require_equal(
            spec, here=f"the ledger {self.path}", there="this run"
        )

    def close(self) -> None:
        """Leave the ledger and the role."""
        self._db.close()
        self._lock.close()

    def present(self, role: Role) -> bool:
        """Whether a process has a role now."""
        return is_taken(self._folder, role)

    def state(self) -> Session:
        """Where the run stands."""
        row = self._db.execute(
            "SELECT session, open, start_step, total_steps, acknowledged, ended, failure FROM run"
        ).fetchone()
        return Session(row[0], bool(row[1]), *row[2:])

    def key(self, task: tuple[int, int], attempt: int) -> str:
        """Prefix of the objects of one attempt at a sample."""
        return f"{self.identity}.{self.session}/{task[0]}-{task[1]}-{attempt}"

    # The trainer's side.

    def open_session(self, start_step: int, total_steps: int) -> Rewound:
        """Start from a checkpoint: what lies behind it is forgotten.

        So are the producer's end, and a failure that no running producer stands for.
        """
        with alone(self._folder), self._write(durable=True, fenced=False):
            counts = dict(
                self._db.execute(
                    "SELECT state, count(*) FROM tasks WHERE step > ? GROUP BY state", (start_step,)
                )
            )
            self._db.execute("DELETE FROM tasks WHERE step > ?", (start_step,))
            self._db.execute("UPDATE tasks SET state = ?, ref = NULL", (State.FREED,))
            self._db.execute(
                "UPDATE run SET session = session + 1, open = 1, start_step = ?1, total_steps = ?2,"
                " acknowledged = ?1, ended = NULL",
                (start_step, total_steps),
            )
            if not self.present("producer"):
                self._db.execute("UPDATE run SET failure = NULL")
        self.session = self.state().number
        settled = counts.pop(State.SETTLED, 0)
        counts.pop(State.PLANNED, 0)
        return Rewound(sum(counts.values()), settled)

    def dispatch(self, step: int) -> list[Entry] | None:
        """Take a step's window, in the order of its positions; None until all of it is committed."""
        entries = self._entries("step = ? AND state = ?", step, State.COMMITTED)
        if len(entries) < self.window:
            return None
        with self._write(durable=False):
            self._db.execute("UPDATE tasks SET state = ? WHERE step = ?", (State.DISPATCHED, step))
        return entries

    def lose(self, task: tuple[int, int], key: str) -> bool:
        """Have a dispatched sample captured anew, as its objects are not what its ref says.

        Returns:
            Whether `key` was its newest ref; if not, it was captured anew already.
        """
        with self._write(durable=True):
            attempt = self._db.execute(
                "SELECT attempt FROM tasks WHERE epoch = ? AND position = ? AND key = ? AND state = ?",
                (*task, key, State.DISPATCHED),
            ).fetchone()
            if attempt is not None:
                self._plan_again(task, attempt[0] + 1)
        return attempt is not None

    def dispatch_again(self, task: tuple[int, int]) -> FeatureRef | None:
        """Take the new ref of a sample that was lost; None until it is committed."""
        found = self._entries("epoch = ? AND position = ? AND state = ?", *task, State.COMMITTED)
        if not found:
            return None
        with self._write(durable=False):
            self._db.execute(
                "UPDATE tasks SET state = ? WHERE epoch = ? AND position = ?", (State.DISPATCHED, *task)
            )
        return found[0].ref

    def acknowledge(self, step: int) -> None:
        """Record, on the disk, that the windows up to `step` were trained; they may be freed."""
        with self._write(durable=True):
            self._db.execute(
                "UPDATE tasks SET state = ? WHERE step <= ? AND state = ?",
                (State.ACKNOWLEDGED, step, State.DISPATCHED),
            )
            self._db.execute("UPDATE run SET acknowledged = max(acknowledged, ?)", (step,))

    def close_session(self) -> int:
        """Take no more features; what was captured and not acknowledged is settled. Returns its count."""
        with self._write(durable=True):
            settled = self._settle("state IN (?, ?)", State.COMMITTED, State.DISPATCHED)
            self._db.execute("UPDATE run SET open = 0")
        return settled

    # The producer's side.

    def attend(self) -> Session:
        """Work for the present session from now on."""
        state = self.state()
        self.session = state.number
        return state

    def untouched(self) -> bool:
        """Whether this session asked for nothing yet."""
        behind = "SELECT 1 FROM tasks, run WHERE step > start_step LIMIT 1"
        return self._db.execute(behind).fetchone() is None

    def plan_window(self, step: int, tasks: Sequence[Task]) -> list[Entry]:
        """Record a window's samples before they are asked for; those that are still to capture.

        A sample that an earlier producer of this session had asked for gets a new attempt.
        """
        with self._write(durable=False):
            for task in tasks:
                where = task.epoch, task.position
                self._db.execute(
                    "INSERT INTO tasks VALUES (?, ?, ?, ?, 0, '', NULL) ON CONFLICT DO NOTHING",
                    (*where, step, State.PLANNED),
                )
                found = self._db.execute(
                    "SELECT attempt FROM tasks WHERE epoch = ? AND position = ? AND state IN (?, ?)",
                    (*where, State.PLANNED, State.SETTLED),  # settled: by a producer that was stopped
                ).fetchone()
                if found:
                    self._plan_again(where, found[0] + 1)
        return self._entries("step = ? AND state = ?", step, State.PLANNED)

    def retry(self, task: tuple[int, int]) -> Entry:
        """A new attempt at a planned sample, under a key of its own."""
        with self._write(durable=False):
            self._plan_again(task, self._entry(task).attempt + 1)
        return self._entry(task)

    def planned(self, up_to_step: int) -> list[Entry]:
        """Samples of the windows up to a step that are to be captured."""
        return self._entries("state = ? AND step <= ?", State.PLANNED, up_to_step)

    def commit(self, refs: Iterable[FeatureRef], tasks: Iterable[tuple[int, int]]) -> list[FeatureRef]:
        """Record, on the disk, the refs of planned samples.

        Returns:
            Refs of samples that have another one, to be freed.

        Raises:
            SessionChanged: if the trainer has started anew; then all of them are to be freed.
        """
        twice = []
        with self._write(durable=True):
            for ref, task in zip(refs, tasks, strict=True):
                done = self._db.execute(
                    "UPDATE tasks SET state = ?, key = ?, ref = ? WHERE epoch = ? AND position = ?"
                    " AND state = ?",
                    (State.COMMITTED, ref.key, json.dumps(ref.to_json()), *task, State.PLANNED),
                )
                if not done.rowcount and self._entry(task).key != ref.key:
                    twice.append(ref)
        return twice

    def acknowledged(self) -> list[Entry]:
        """Samples whose objects may be freed."""
        return self._entries("state = ?", State.ACKNOWLEDGED)

    def free(self, entries: Iterable[Entry]) -> None:
        """Note that the objects of samples were removed."""
        with self._write(durable=False):
            self._db.executemany(
                "UPDATE tasks SET state = ?, ref = NULL WHERE epoch = ? AND position = ?",
                [(State.FREED, *entry.task) for entry in entries],
            )

    def end(self, step: int, partial: Iterable[tuple[int, int]] = ()) -> None:
        """Capture no more: `step` is the last whole window. `partial` samples behind it are settled."""
        with self._write(durable=True):
            for task in partial:
                self._settle("epoch = ? AND position = ?", *task)
            self._db.execute("UPDATE run SET ended = ?", (step,))

    def fail(self, message: str) -> None:
        """Tell the trainer why there will be no more features."""
        with self._write(durable=True, fenced=False):
            self._db.execute("UPDATE run SET failure = ?", (message,))

    def _forget_producer(self) -> None:
        """The end or failure of an earlier producer is not this one's."""
        with self._write(durable=True, fenced=False):
            self._db.execute("UPDATE run SET ended = NULL, failure = NULL")

    def _plan_again(self, task: tuple[int, int], attempt: int) -> None:
        self._db.execute(
            "UPDATE tasks SET state = ?, attempt = ?, key = ?, ref = NULL WHERE epoch = ? AND position = ?",
            (State.PLANNED, attempt, self.key(task, attempt), *task),
        )

    def _settle(self, which: str, *values: Any) -> int:
        return self._db.execute(
            f"UPDATE tasks SET state = ?, ref = NULL WHERE {which}", (State.SETTLED, *values)
        ).rowcount

    def _entry(self, task: tuple[int, int]) -> Entry:
        return self._entries("epoch = ? AND position = ?", *task)[0]

    def _entries(self, which: str, *values: Any) -> list[Entry]:
        rows = self._db.execute(
            "SELECT epoch, position, step, attempt, key, ref FROM tasks"
            f" WHERE {which} ORDER BY epoch, position",
            values,
        )
        return [
            Entry(*row[:5], ref=None if row[5] is None else FeatureRef.from_json(json.loads(row[5])))
            for row in rows
        ]

    @contextmanager
    def _write(self, *, durable: bool, fenced: bool = True) -> Generator[None]:
        """One transaction; `fenced` refuses it once another session has begun."""
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if fenced and (found := self.state().number) != self.session:
                raise SessionChanged(f"{self.path}: session {found} has begun; this was {self.session}")
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def read_identity(folder: Path) -> str | None:
    """What begins the keys of a run's objects; None if the run has no ledger."""
    path = folder / FILE
    if not path.exists():
        return None
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS)
    try:
        row = db.execute("SELECT identity FROM run").fetchone()
    except sqlite3.OperationalError:  # killed before it was set up: it never asked for anything
        return None
    finally:
        db.close()
    return row and row[0]
