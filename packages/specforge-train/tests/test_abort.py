import json
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import start_ranks
from tiny_training import tiny_config, tiny_trainer

from specforge_config.deployment import TrainerNodes
from specforge_config.topology import Topology
from specforge_train.abort import _is_peer_failure, abort_on_error, read_errors
from specforge_train.parallel import start_world


def test_a_world_of_one_records_and_raises_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = tmp_path / "torchrun.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(torchrun))
    with (
        pytest.raises(ValueError, match="first"),
        abort_on_error(tmp_path, 0, 1),
        abort_on_error(tmp_path, 0, 1, lambda: 6),
    ):
        raise ValueError("first")
    [error] = read_errors(tmp_path)
    assert (error["rank"], error["step"], error["type"], error["message"]) == (0, 6, "ValueError", "first")
    assert 'raise ValueError("first")' in error["traceback"]
    assert abs(error["time"] - time.time()) < 60
    message = json.loads(torchrun.read_text())["message"]
    assert message["message"] == "ValueError: first"
    assert 'raise ValueError("first")' in message["extraInfo"]["py_callstack"]
    with abort_on_error(tmp_path, 0, 1):
        assert read_errors(tmp_path) == [], "an earlier start's error is removed"


@pytest.mark.parametrize(
    ("error", "setting"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            r"training\.batch_size, data\.max_length",
        ),
        (MemoryError(), r"deployment\.trainer\.nproc_per_node"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            r"deployment\.trainer\.nproc_per_node",
        ),
    ],
)
def test_out_of_memory_names_the_settings(tmp_path: Path, error: Exception, setting: str) -> None:
    with pytest.raises(type(error)), abort_on_error(tmp_path, 0, 1):
        raise error
    [recorded] = read_errors(tmp_path)
    assert re.search(setting, recorded["message"])


def fail_inside_a_collective(folder: str) -> None:
    world = start_world(TrainerNodes(nproc_per_node=2, device="cpu", cpu_threads=1), Topology(2), "full")
    with abort_on_error(Path(folder), world.rank, world.size, lambda: 3):
        world.sum_(torch.ones(1))
        if world.rank == 1:
            raise KeyError("what went wrong")
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("error", "peer"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]"), True),
        (RuntimeError("an error of its own"), False),
        (type("StoreError", (RuntimeError,), {})("the store: Connection reset by peer"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_only_lost_ranks_are_peers(error: Exception, peer: bool) -> None:
    assert _is_peer_failure(error) == peer


def test_a_failing_rank_ends_the_others_with_its_reason(tmp_path: Path) -> None:
    ranks = start_ranks(fail_inside_a_collective, 2, tmp_path / "logs", str(tmp_path))
    assert ranks.wait(120) == [1, 1]
    origin, follower = read_errors(tmp_path)
    assert (origin["rank"], origin["peer"], origin["type"]) == (1, False, "KeyError")
    assert (follower["rank"], follower["peer"], follower["step"]) == (0, True, 3)
    assert "the origin is rank 1: KeyError: 'what went wrong'" in follower["message"]
    assert "rank 0, in step 4: ended by the failure of a peer" in ranks.output()


def train_for_long(folder: str) -> None:
    config = tiny_config(Path(folder), 2, training={"sharding": "full", "save_every": 1})
    tiny_trainer(config, 10_000).train()


def test_a_killed_peer_ends_the_survivor_within_seconds(tmp_path: Path) -> None:
    ranks = start_ranks(train_for_long, 2, tmp_path / "logs", str(tmp_path))
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks.kill(1)
    assert ranks.wait(20) == [1, -9]
    [error] = read_errors(tmp_path)
    assert (error["rank"], error["peer"]) == (0, True)
    assert "a peer ended without a word (killed, or out of host memory)" in error["message"]
