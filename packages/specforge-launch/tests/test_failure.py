import json
from pathlib import Path
from typing import Any

from specforge_launch.failure import explain


def rank(errors: Path, number: int, error: str, at: float, **fields: Any) -> None:
    record = {
        "rank": number,
        "step": 3,
        "time": at,
        "type": error.partition(": ")[0],
        "message": error.partition(": ")[2],
        "traceback": f"Traceback of {number}",
        "peer": False,
    }
    (errors / f"rank-{number}.json").write_text(json.dumps({**record, **fields}))


def exits(errors: Path, codes: dict[int, int], node: int = 0) -> None:
    (errors / f"exits.node{node}.json").write_text(json.dumps({"time": 9.0, "exit_codes": codes}))


def test_the_earliest_error_of_its_own_is_the_origin(tmp_path: Path) -> None:
    rank(tmp_path, 0, "RuntimeError: Connection closed by peer", 1.0, peer=True)
    rank(tmp_path, 2, "KeyError: 'later'", 3.0)
    rank(tmp_path, 1, "FloatingPointError: gradient norm of step 4 is nan", 2.0)
    exits(tmp_path, {0: 1, 1: 1, 2: 1, 3: -15})
    failure = explain(tmp_path, last_step=3)
    assert failure.headline == "rank 1 failed in step 4: FloatingPointError: gradient norm of step 4 is nan"
    assert failure.traceback == "Traceback of 1"
    assert failure.peers == (
        "rank 2 then failed in step 4: KeyError: 'later'",
        "rank 0 then failed in step 4: RuntimeError: Connection closed by peer",
        "ended because of it: rank 3",
    )
    assert not failure.user_error


def test_a_rank_that_was_killed_comes_before_its_peers_complaints(tmp_path: Path) -> None:
    rank(tmp_path, 0, "RuntimeError: Connection closed by peer", 1.0, peer=True, step=6)
    exits(tmp_path, {0: 1, 1: -9})
    failure = explain(tmp_path, last_step=6)
    assert failure.headline.startswith("rank 1 was killed by SIGKILL in step 7")
    assert "out-of-memory" in failure.headline
    assert failure.peers == ("rank 0 then failed in step 7: RuntimeError: Connection closed by peer",)


def test_a_rank_killed_in_silence_is_named_with_the_step_that_was_at_work(tmp_path: Path) -> None:
    exits(tmp_path, {0: -15, 1: -11})
    failure = explain(tmp_path, last_step=6)
    assert failure.headline == "rank 1 was killed by SIGSEGV in step 7"
    assert failure.peers == ("ended because of it: rank 0",)


def test_ranks_of_all_nodes_are_looked_at(tmp_path: Path) -> None:
    exits(tmp_path, {0: -15, 1: -15}, node=0)
    exits(tmp_path, {2: -15, 3: -7}, node=1)
    failure = explain(tmp_path, last_step=None)
    assert failure.headline == "rank 3 was killed by SIGBUS"
    assert failure.peers == ("ended because of it: ranks 0, 1, 2",)


def test_a_value_error_before_training_is_the_users(tmp_path: Path) -> None:
    rank(tmp_path, 0, "ValueError: data.train: no file x\n  second line", 1.0, step=None)
    exits(tmp_path, {0: 1})
    failure = explain(tmp_path, last_step=None)
    assert failure.user_error
    assert failure.headline == "data.train: no file x\n  second line"
    assert failure.traceback == ""


def test_a_value_error_while_training_keeps_its_traceback(tmp_path: Path) -> None:
    rank(tmp_path, 0, "ValueError: partial capture", 1.0)
    failure = explain(tmp_path, last_step=3)
    assert not failure.user_error
    assert failure.traceback == "Traceback of 0"


def test_an_agent_that_left_no_word(tmp_path: Path) -> None:
    assert "agent" in explain(tmp_path, last_step=None).headline
