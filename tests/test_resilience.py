"""Runs that are hurt: ranks that fail or are killed, launchers that are killed at any moment."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from launched import Launched, require_no_process

from specforge_train.checkpoint import find_damage, read_meta

Launch = Callable[..., Launched]
UNMEASURED = ["evaluation.prompts=[]", "evaluation.interval=0"]
TWO_RANKS = ["deployment.trainer.nproc_per_node=2", *UNMEASURED]
KILLS = 10


def test_a_killed_rank_is_named_first_and_ends_the_command_soon(launch: Launch) -> None:
    run = launch("killed", *TWO_RANKS, "training.epochs=400")
    run.wait_for_step(3)
    victim = run.ranks()[1]
    started = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ended = run.end(timeout=20)
    assert time.monotonic() - started < 20
    assert ended.code == 1, ended
    first, *rest = ended.err.splitlines()
    assert first.startswith("rank 1 was killed by SIGKILL in step ")
    assert any("rank 0" in line for line in rest)
    require_no_process(ended.folder)


def test_an_error_of_one_rank_is_told_with_its_traceback_on_top(launch: Launch, tmp_path: Path) -> None:
    """The one row without two supervised tokens in a row has no anchor: only the rank that gets it fails."""
    rows = [{"input_ids": list(range(20, 40)), "loss_mask": [1] * 20} for _ in range(48)]
    rows[30] = {"input_ids": list(range(20, 40)), "loss_mask": [0] * 10 + [1] + [0] * 9}
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"data.train={data}", f"data.cache_dir={tmp_path}", "training.unsupervised=error"]
    run = launch("unsupervised", *TWO_RANKS, *arguments)
    run.wait_for(lambda event: event["stage"] == "train")
    started = time.monotonic()
    ended = run.end()
    assert time.monotonic() - started < 20
    assert ended.code == 1, ended
    lines = ended.err.splitlines()
    assert lines[0].startswith("rank ")
    assert "ValueError" in lines[0]
    assert "rows.jsonl:31" in lines[0]
    assert lines[1].startswith("Traceback")
    other = 1 - int(lines[0].split()[1])
    assert any(f"rank {other}" in line for line in lines[2:])
    require_no_process(ended.folder)


def hunt(launch: Launch, arguments: list[str]) -> Launched:
    """Start the run anew."""
    run = launch("hunted", *arguments)
    run.forget()
    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_launcher_killed_at_any_moment_leaves_a_whole_checkpoint(launch: Launch) -> None:
    """Ten kills while ranks start, train and save; each next start goes on from a whole checkpoint."""
    moment = random.Random()
    endless = [
        *UNMEASURED,
        "training.epochs=400",
        "training.save_every=2",
        "schedule.kind=constant",
    ]
    reached = 0
    for kill in range(KILLS):
        run = hunt(launch, endless)
        if kill % 2:
            time.sleep(moment.uniform(0, 4))
        else:
            run.wait_for_step(reached + moment.randint(1, 4))
            time.sleep(moment.uniform(0, 0.4))
        run.process.send_signal(signal.SIGKILL)
        run.end(timeout=30)
        require_no_process(run.folder)
        name = run.folder / "checkpoints" / "latest"
        if name.exists():
            latest = name.parent / name.read_text().strip()
            assert find_damage(latest) is None
            step = read_meta(latest)["step"]
            assert step >= reached
            reached = step
    assert reached > 0
    audit(launch, endless, reached)


def audit(launch: Launch, arguments: list[str], reached: int) -> None:
    """Kill by two Ctrl-C, then stop by one; no sample may be missing from the record or stand in it twice."""
    run = hunt(launch, arguments)
    run.wait_for_step(reached + 1)
    for _ in range(2):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert run.end(timeout=30).code == 130
    require_no_process(run.folder)

    run = hunt(launch, arguments)
    run.wait_for_step(reached + 3)
    run.process.send_signal(signal.SIGTERM)
    ended = run.end(timeout=60)
    assert ended.code == 143, ended
    steps = ended.samples()
    assert [step for step, _ in steps] == list(range(1, len(steps) + 1))
    positions = [tuple(sample[:2]) for sample in chain.from_iterable(part for _, part in steps)]
    expected = [(epoch, position) for epoch in range(400) for position in range(48)]
    assert positions == expected[: len(positions)]
    assert [row["step"] for row in ended.rows()] == [step for step, _ in steps]
