"""kill -9 of each part of a run during traffic: what can go on does, the rest ends soon and says why, and a
resume trains each planned sample once. Servers and stores are real, parts are processes.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from feature_flow import CONSUMER, QUICK, objects, ten_prompts, two_rank_plan, wait_until
from part_processes import RANKS, Parts, Setup, parts_of, produce, serve, total_of

from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.roles import is_taken
from specforge_capture.stores.base import open_store
from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_capture.stores.mooncake import load_library
from specforge_capture.targets.hf import HFTarget
from specforge_config.store import FileStore, MooncakeStore

pytestmark = pytest.mark.slow
CONFIG = QUICK.model_copy(
    update={"outage_seconds": 90, "trainer_seconds": 120, "retries": 50, "high_samples": 8}
)


@pytest.fixture
def setup(tmp_path: Path, target: HFTarget, qwen3_folder: Path, renderer: ChatRenderer) -> Setup:
    """Eight steps over a store of files; one server."""
    prompts = ten_prompts(tmp_path, target.spec, renderer)
    return Setup(
        folder=tmp_path / "run",
        target=qwen3_folder,
        spec=target.spec,
        plan=replace(two_rank_plan(prompts), epochs=4),
        prompts=(prompts.path, prompts.report, prompts.fingerprint),
        store=FileStore(kind="files", folder=str(tmp_path / "objects")),
        ports=tuple(free_ports(1)),
        producer=CONFIG,
        consumer=CONSUMER.model_copy(update={"producer_seconds": 90}),
    )


@pytest.fixture
def run(setup: Setup) -> Iterator[Parts]:
    """All parts, started."""
    with parts_of(setup) as parts:
        start(parts)
        yield parts


def start(parts: Parts) -> None:
    for number, port in enumerate(parts.setup.ports):
        parts.start(f"server-{number}", serve, port)
    parts.start("producer", produce)
    wait_until(lambda: is_taken(parts.setup.folder, "producer"), 100)  # ranks may give it little time
    parts.start_ranks(free_ports(1)[0])


def require_trained_once(setup: Setup, target: HFTarget) -> None:
    """Check that each rank took the plan's samples in the plan's order, with the target's states."""
    prompts = PromptSet(*setup.prompts)
    for rank in range(RANKS):
        rows = setup.taken(rank)
        assert [row["step"] for row in rows] == list(range(1, setup.plan.total_steps + 1))
        for row in rows:
            tasks = [
                t for part in setup.plan.micro_batches(setup.plan.window(row["step"] - 1), rank) for t in part
            ]
            assert [tuple(sample[:2]) for sample in row["samples"]] == [(t.epoch, t.position) for t in tasks]
            for task, (*_, total) in zip(tasks, row["samples"], strict=True):
                wanted = total_of(target.capture([prompts.row(task.row)]))
                assert total == pytest.approx(wanted, rel=1e-3, abs=1e-2)


def test_a_killed_producer_is_replaced_in_the_same_session(
    run: Parts, target: HFTarget, tmp_path: Path
) -> None:
    run.wait_for_step(2)
    run.kill("producer")
    run.start("producer", produce)
    assert run.wait("rank-0", "rank-1", "producer") == [0, 0, 0], run.output()
    require_trained_once(run.setup, target)
    assert objects(tmp_path) == []


def test_a_killed_rank_ends_its_peer_and_both_resume_with_the_same_producer(
    run: Parts, target: HFTarget, tmp_path: Path
) -> None:
    run.wait_for_step(3)
    run.kill("rank-1")
    assert run.wait("rank-0") == [1]
    resumed = run.setup.checkpoint
    assert resumed >= 2
    run.start_ranks(free_ports(1)[0])
    assert run.wait("rank-0", "rank-1", "producer") == [0, 0, 0], run.output()
    assert f"samples were captured after step {resumed}, the checkpoint" in run.log("rank-0")
    assert "the trainer has started anew" in run.log("producer")
    require_trained_once(run.setup, target)
    assert objects(tmp_path) == []


def test_without_its_producer_the_trainer_ends_soon_and_a_resume_goes_on(
    setup: Setup, target: HFTarget, tmp_path: Path
) -> None:
    soon = replace(setup, consumer=CONSUMER.model_copy(update={"producer_seconds": 0.5}))
    with parts_of(soon) as parts:
        start(parts)
        parts.wait_for_step(3)
        parts.kill("producer")
        assert parts.wait("rank-0", "rank-1") == [1, 1]
        assert "no producer has been running" in parts.log("rank-0") + parts.log("rank-1")
        parts.setup = setup  # which gives a producer time to start
        parts.start_ranks(free_ports(1)[0])
        parts.start("producer", produce)
        assert parts.wait("rank-0", "rank-1", "producer") == [0, 0, 0], parts.output()
        require_trained_once(setup, target)
        assert objects(tmp_path) == []


def test_over_mooncake_a_killed_server_is_survived_and_a_killed_master_told(
    setup: Setup, target: HFTarget, tmp_path: Path
) -> None:
    try:
        load_library()
    except ValueError as error:
        raise pytest.skip.Exception(str(error)) from error
    port, metrics = free_ports(2)
    settings = MasterSettings(port=port, metrics_port=metrics, lease_seconds=0.3, client_ttl_seconds=2)
    store = MooncakeStore(master=settings.address, capacity_bytes=16 << 20, transfer_timeout_seconds=5)
    over = replace(setup, store=store, ports=tuple(free_ports(2)))
    with parts_of(over) as run:
        with running_master(settings, tmp_path / "master.log") as master:
            start(run)
            run.wait_for_step(2)
            run.kill("server-0")  # what it held is captured anew
            run.wait_for_step(5)
            master.kill()
            assert run.wait("rank-0", "rank-1", "producer") == [1, 1, 1]
        for rank in range(RANKS):
            told = run.log(f"rank-{rank}")
            assert "the master cannot be reached" in told or "by peer" in told
        with running_master(settings, tmp_path / "master.log"):  # the server finds it by itself
            run.start("producer", produce)
            run.start_ranks(free_ports(1)[0])
            assert run.wait("rank-0", "rank-1", "producer") == [0, 0, 0], run.output()
            require_trained_once(over, target)
            with closing(open_store(store, contribute=False)) as left:
                assert left.remove_prefix("") == 0
