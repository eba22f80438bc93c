"""Real SQLite files, and real processes that are killed between two steps of the protocol."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FunctionType

import pytest
from ledger_parts import PLAN, SPEC, capture, ref_of

from specforge_capture.ledger import Ledger, SessionChanged, State, read_identity
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.roles import Role
from specforge_config.features import CaptureSpec


def open_ledger(folder: Path, role: Role, plan: PromptPlan = PLAN, spec: CaptureSpec = SPEC) -> Ledger:
    return Ledger(folder, plan, spec, role)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[Ledger, Ledger]]:
    """A producer's and a trainer's connection, in the first session of six steps of which four are run."""
    with closing(open_ledger(tmp_path, "trainer")) as trainer:
        trainer.open_session(0, 4)
        with closing(open_ledger(tmp_path, "producer")) as producer:
            producer.attend()
            yield producer, trainer


def states(folder: Path) -> dict[tuple[int, int], str]:
    """What another program reads in the file."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        return {(e, p): state for e, p, state in db.execute("SELECT epoch, position, state FROM tasks")}


def test_a_sample_passes_from_planned_to_freed(both: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    producer, trainer = both
    tasks = [(task.epoch, task.position) for task in PLAN.window(0)]
    entries = producer.plan_window(1, PLAN.window(0))
    assert [entry.task for entry in entries] == tasks
    assert states(tmp_path) == dict.fromkeys(tasks, State.PLANNED)
    assert trainer.dispatch(1) is None
    producer.commit(map(ref_of, entries), tasks)
    assert states(tmp_path) == dict.fromkeys(tasks, State.COMMITTED)
    window = trainer.dispatch(1)
    assert window is not None
    assert [entry.ref for entry in window] == [ref_of(entry) for entry in entries]
    assert producer.acknowledged() == []
    trainer.acknowledge(1)
    assert states(tmp_path) == dict.fromkeys(tasks, State.ACKNOWLEDGED)
    freed = producer.acknowledged()
    assert [entry.ref for entry in freed] == [ref_of(entry) for entry in entries]
    producer.free(freed)
    assert states(tmp_path) == dict.fromkeys(tasks, State.FREED)
    assert producer.state().acknowledged == 1


def test_a_window_is_dispatched_whole_and_once(both: tuple[Ledger, Ledger]) -> None:
    producer, trainer = both
    entries = producer.plan_window(1, PLAN.window(0))
    producer.commit(map(ref_of, entries[:3]), [entry.task for entry in entries[:3]])
    assert trainer.dispatch(1) is None
    producer.commit([ref_of(entries[3])], [entries[3].task])
    assert trainer.dispatch(1) is not None
    assert trainer.dispatch(1) is None


def test_a_second_answer_is_handed_back(both: tuple[Ledger, Ledger]) -> None:
    producer, trainer = both
    first = producer.plan_window(1, PLAN.window(0))
    second = producer.retry(first[0].task)
    assert second.key != first[0].key
    assert second.prefix == first[0].prefix
    assert producer.commit([ref_of(first[0])], [first[0].task]) == []
    assert producer.commit([ref_of(second)], [second.task]) == [ref_of(second)]
    assert producer.commit([ref_of(first[0])], [first[0].task]) == []  # the same answer again
    producer.commit(map(ref_of, first[1:]), [entry.task for entry in first[1:]])
    window = trainer.dispatch(1)
    assert window is not None
    assert window[0].ref == ref_of(first[0])


def test_a_lost_sample_gets_a_new_key(both: tuple[Ledger, Ledger]) -> None:
    producer, trainer = both
    old = capture(producer, 1)[2]
    trainer.dispatch(1)
    assert trainer.lose(old.task, old.key)
    assert not trainer.lose(old.task, old.key)
    assert trainer.dispatch_again(old.task) is None
    (again,) = producer.planned(1)
    assert (again.task, again.attempt) == (old.task, 2)
    producer.commit([ref_of(again)], [again.task])
    assert trainer.dispatch_again(old.task) == ref_of(again)
    trainer.acknowledge(1)
    assert {entry.key for entry in producer.acknowledged()} >= {again.key}


def test_a_new_session_forgets_what_lies_behind_the_checkpoint(tmp_path: Path) -> None:
    with (
        closing(open_ledger(tmp_path, "trainer")) as trainer,
        closing(open_ledger(tmp_path, "producer")) as p,
    ):
        trainer.open_session(0, 4)
        p.attend()
        old = [capture(p, step) for step in (1, 2, 3)]
        for step in (1, 2):
            trainer.dispatch(step)
            trainer.acknowledge(step)
        found = trainer.open_session(1, 4)
        assert (found.unfinished, found.settled) == (8, 0)
        assert trainer.state().acknowledged == 1
        assert set(states(tmp_path).values()) == {State.FREED}
        with pytest.raises(SessionChanged):
            p.commit([ref_of(old[2][0])], [old[2][0].task])
        with pytest.raises(SessionChanged):
            p.plan_window(4, PLAN.window(3))
        p.attend()
        assert p.untouched()
        keys = {entry.key for entry in capture(p, 2)}
        assert not p.untouched()
        assert keys.isdisjoint(entry.key for window in old for entry in window)


def test_a_partial_window_is_settled_and_the_next_start_says_so(both: tuple[Ledger, Ledger]) -> None:
    producer, trainer = both
    capture(producer, 1)
    partial = producer.plan_window(2, PLAN.window(1))[:2]
    producer.end(1, [entry.task for entry in partial])
    assert trainer.state().ended == 1
    trainer.dispatch(1)
    trainer.acknowledge(1)
    assert trainer.dispatch(2) is None
    assert trainer.close_session() == 0
    assert not producer.state().open
    found = trainer.open_session(1, 4)
    assert (found.unfinished, found.settled) == (0, 2)
    assert trainer.state().ended is None


def test_closing_a_session_settles_what_was_not_trained(both: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    producer, trainer = both
    capture(producer, 1)
    capture(producer, 2)
    trainer.dispatch(1)
    assert trainer.close_session() == 8
    assert set(states(tmp_path).values()) == {State.SETTLED}


def test_a_failure_is_told_until_its_producer_is_gone(tmp_path: Path) -> None:
    with closing(open_ledger(tmp_path, "trainer")) as trainer:
        with closing(open_ledger(tmp_path, "producer")) as producer:
            producer.fail("no server")
            trainer.open_session(0, 4)
            assert trainer.state().failure == "no server"
        with closing(open_ledger(tmp_path, "producer")):
            assert trainer.state().failure is None  # it is not the next one's
        with closing(open_ledger(tmp_path, "producer")) as producer:
            producer.fail("no server")
        trainer.open_session(0, 4)
        assert trainer.state().failure is None


@pytest.mark.parametrize(
    ("change", "named"),
    [({"batch_size": 2}, r"batch_size: 2 \(this run\) != 1"), ({"fingerprint": "x"}, "fingerprint: 'x'")],
)
def test_a_ledger_of_another_plan_is_refused(change: dict, named: str, tmp_path: Path) -> None:
    open_ledger(tmp_path, "producer").close()
    with pytest.raises(ValueError, match=named):
        open_ledger(tmp_path, "trainer", replace(PLAN, **change))
    open_ledger(tmp_path, "trainer").close()  # the refused one gave its role back


def test_a_ledger_of_another_contract_is_refused(tmp_path: Path) -> None:
    open_ledger(tmp_path, "producer").close()
    with pytest.raises(ValueError, match="target_revision"):
        open_ledger(tmp_path, "trainer", spec=SPEC.model_copy(update={"target_revision": "other"}))


def test_one_process_at_a_time_has_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specforge_capture.locks._GONE_SECONDS", 0.2)
    with closing(open_ledger(tmp_path, "producer")) as first:
        assert first.present("producer")
        assert not first.present("trainer")
        with pytest.raises(ValueError, match=f"already has a running producer, process {os.getpid()}"):
            open_ledger(tmp_path, "producer")
    open_ledger(tmp_path, "producer").close()


def test_a_folder_without_a_ledger_has_no_identity(tmp_path: Path) -> None:
    assert read_identity(tmp_path) is None
    with closing(open_ledger(tmp_path, "producer")) as ledger:
        assert read_identity(tmp_path) == ledger.identity


def _protocol(folder: Path) -> Iterator[None]:
    """One producer and one trainer in turns; a pause is where a process may be killed."""
    trainer = open_ledger(folder, "trainer")
    yield
    trainer.open_session(0, 4)
    producer = open_ledger(folder, "producer")
    yield
    producer.attend()
    for step in (1, 2):
        entries = producer.plan_window(step, PLAN.window(step - 1))
        yield
        producer.commit(map(ref_of, entries), [entry.task for entry in entries])
        yield
        trainer.dispatch(step)
        yield
        trainer.acknowledge(step)
        yield
        producer.free(producer.acknowledged())
        yield
    trainer.close_session()
    yield


def _in_dying_processes(die: FunctionType, folder: Path, points: int) -> None:
    """Run `die(folder, point)` for each point in a process of its own, forked from a small one."""
    command = [sys.executable, __file__, die.__name__, str(folder), str(points)]
    subprocess.run(command, check=True, timeout=120)


def _fork_each(name: str, folder: str, points: str) -> None:
    for at in range(int(points)):
        if (child := os.fork()) == 0:
            globals()[name](Path(folder) / str(at), at)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _run_and_die(folder: Path, at: int) -> None:
    for number, _ in enumerate(_protocol(folder)):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_any_point_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    reached = [states(reference) for _ in _protocol(reference)]
    _in_dying_processes(_run_and_die, tmp_path, len(reached))
    for at, done in enumerate(reached):
        # What the killed process had said was done is in the file, to the last step.
        assert states(tmp_path / str(at)) == done
        # From the newest checkpoint that the trainer may have written by then, the rest is trained, once.
        checkpoint = min(2, max(0, (at - 4) // 5 + 1))
        assert _finish(tmp_path / str(at), checkpoint) == [
            (task.epoch, task.position) for step in range(checkpoint, 4) for task in PLAN.window(step)
        ]


def _finish(folder: Path, checkpoint: int) -> list[tuple[int, int]]:
    """Run all steps behind a checkpoint; the samples that were dispatched."""
    trained: list[tuple[int, int]] = []
    with closing(open_ledger(folder, "trainer")) as trainer, closing(open_ledger(folder, "producer")) as p:
        trainer.open_session(checkpoint, 4)
        p.attend()
        for step in range(checkpoint + 1, 5):
            capture(p, step)
            window = trainer.dispatch(step)
            assert window is not None
            trained += [entry.task for entry in window]
            trainer.acknowledge(step)
        p.free(p.acknowledged())
        trainer.close_session()
    return trained


def test_a_producer_killed_in_a_session_goes_on_in_it(tmp_path: Path) -> None:
    trainers = [open_ledger(tmp_path / str(at), "trainer") for at in range(3)]
    for trainer in trainers:
        trainer.open_session(0, 4)
    _in_dying_processes(_produce_and_die, tmp_path, 3)
    for at, trainer in enumerate(trainers):
        with closing(trainer), closing(open_ledger(tmp_path / str(at), "producer")) as producer:
            assert producer.attend().number == 1
            windows = [producer.plan_window(step, PLAN.window(step - 1)) for step in (1, 2)]
            # What was committed stays; what was only asked for is asked for under another key.
            assert [[entry.attempt for entry in window] for window in windows] == [
                [[2] * 4, [1] * 4],
                [[], [1] * 4],
                [[], [2] * 4],
            ][at]


def _produce_and_die(folder: Path, at: int) -> None:
    producer = open_ledger(folder, "producer")
    producer.attend()
    entries = producer.plan_window(1, PLAN.window(0))
    if at > 0:
        producer.commit(map(ref_of, entries), [entry.task for entry in entries])
    if at > 1:
        producer.plan_window(2, PLAN.window(1))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _fork_each(*sys.argv[1:])
