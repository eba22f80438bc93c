import json
from pathlib import Path
from typing import Any

import pytest

from specforge_launch.failure import explain
from specforge_launch.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.errors.mkdir()
    return run


def rank(folder: RunFolder, number: int, error: str, at: float, **fields: Any) -> None:
    record = {
        "rank": number,
        "step": 3,
        "time": at,
        "type": error.partition(": ")[0],
        "message": error.partition(": ")[2],
        "traceback": f"Traceback of {number}",
        "peer": False,
    }
    (folder.errors / f"rank-{number}.json").write_text(json.dumps({**record, **fields}))


def exits(folder: RunFolder, codes: dict[int, int], node: int = 0) -> None:
    (folder.errors / f"exits.node{node}.json").write_text(json.dumps({"time": 9.0, "exit_codes": codes}))


def test_the_earliest_error_of_its_own_is_the_origin(folder: RunFolder) -> None:
    rank(folder, 0, "RuntimeError: Connection closed by peer", 1.0, peer=True)
    rank(folder, 2, "KeyError: 'later'", 3.0)
    rank(folder, 1, "FloatingPointError: gradient norm of step 4 is nan", 2.0)
    exits(folder, {0: 1, 1: 1, 2: 1, 3: -15})
    failure = explain(folder, last_step=3)
    assert failure.headline == "rank 1 failed in step 4: FloatingPointError: gradient norm of step 4 is nan"
    assert failure.traceback == "Traceback of 1"
    assert failure.peers == (
        "rank 2 then failed in step 4: KeyError: 'later'",
        "rank 0 then failed in step 4: RuntimeError: Connection closed by peer",
        "ended because of it: rank 3",
    )
    assert not failure.user_error


def test_a_rank_that_was_killed_comes_before_its_peers_complaints(folder: RunFolder) -> None:
    rank(folder, 0, "RuntimeError: Connection closed by peer", 1.0, peer=True, step=6)
    exits(folder, {0: 1, 1: -9})
    failure = explain(folder, last_step=6)
    assert failure.headline.startswith("rank 1 was killed by SIGKILL in step 7")
    assert "out-of-memory" in failure.headline
    assert failure.peers == ("rank 0 then failed in step 7: RuntimeError: Connection closed by peer",)


def test_a_rank_killed_in_silence_is_named_with_the_step_that_was_at_work(folder: RunFolder) -> None:
    exits(folder, {0: -15, 1: -11})
    failure = explain(folder, last_step=6)
    assert failure.headline == "rank 1 was killed by SIGSEGV in step 7"
    assert failure.peers == ("ended because of it: rank 0",)


def test_ranks_of_all_nodes_are_looked_at(folder: RunFolder) -> None:
    exits(folder, {0: -15, 1: -15}, node=0)
    exits(folder, {2: -15, 3: -7}, node=1)
    failure = explain(folder, last_step=None)
    assert failure.headline == "rank 3 was killed by SIGBUS"
    assert failure.peers == ("ended because of it: ranks 0, 1, 2",)


def test_a_value_error_before_training_is_the_users(folder: RunFolder) -> None:
    rank(folder, 0, "ValueError: data.train: no file x\n  second line", 1.0, step=None)
    exits(folder, {0: 1})
    failure = explain(folder, last_step=None)
    assert failure.user_error
    assert failure.headline == "data.train: no file x\n  second line"
    assert failure.traceback == ""


def test_a_value_error_while_training_keeps_its_traceback(folder: RunFolder) -> None:
    rank(folder, 0, "ValueError: partial capture", 1.0)
    failure = explain(folder, last_step=3)
    assert not failure.user_error
    assert failure.traceback == "Traceback of 0"


def test_an_agent_that_left_no_word(folder: RunFolder) -> None:
    assert "agent" in explain(folder, last_step=None).headline
