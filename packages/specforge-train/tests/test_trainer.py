"""Whole runs of a real DSpark draft over synthetic features, on one and two gloo ranks."""

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks, start_ranks
from tiny_training import TinyStream, pack, sample, tiny_config, tiny_trainer
from torch import Tensor, nn

from specforge_config.features import FeatureBatch, StreamStopped
from specforge_train.abort import read_errors
from specforge_train.checkpoint import newest_checkpoint
from specforge_train.decode import DecodeCounts
from specforge_train.parallel import World, full_state
from specforge_train.weights import read_weights


def rows(folder: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` that hold `kind`, without measured times and sizes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in lines if kind in row]


def samples(folder: Path, rank: int) -> list[list[Any]]:
    """The (epoch, position, id) that a rank trained on, in order."""
    lines = (folder / f"samples.rank{rank}.jsonl").read_text().splitlines()
    return [sample for line in lines for sample in json.loads(line)["samples"]]


def stop_at(folder: Path, step: int) -> Any:
    """A stream's `change` that asks for a stop while `step` runs."""

    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        if at == step:
            (folder / "stop").touch()
        return batch

    return change


def test_six_steps_equal_three_a_resume_and_three(tmp_path: Path, world: World) -> None:
    sections: dict[str, Any] = {
        "training": {"global_batch_size": 4, "save_every": 3},
        "tracking": {"samples": True},
    }
    whole = tiny_trainer(tiny_config(tmp_path / "whole", **sections), 6, world=world)
    whole.train()
    parted = tiny_config(tmp_path / "parted", **sections)
    first = tiny_trainer(parted, 6, world=world, change=stop_at(tmp_path / "parted", 3)).train()
    assert (first.steps, first.stopped) == (3, True)
    assert not (tmp_path / "parted" / "stop").exists()
    second = tiny_trainer(parted, 6, world=world)
    summary = second.train()
    assert (summary.start_step, summary.steps, summary.samples, summary.stopped) == (3, 6, 24, False)
    for name, value in full_state(whole.model).items():
        assert torch.equal(full_state(second.model)[name], value), name
    assert min(first.samples_per_s, summary.samples_per_s) > 0
    finished = tiny_trainer(parted, 6, world=world).train()
    assert replace(finished, start_step=3, last=summary.last) == summary
    assert rows(tmp_path / "parted") == rows(tmp_path / "whole")
    assert samples(tmp_path / "parted", 0) == samples(tmp_path / "whole", 0)
    assert [row["step"] for row in rows(tmp_path / "whole")] == [1, 2, 3, 4, 5, 6]
    assert [(row["epoch"], row["first"], row["count"]) for row in rows(tmp_path / "whole")][2:4] == [
        (0, 8, 4),
        (1, 0, 4),
    ]


def test_a_stop_request_is_honoured_within_two_steps(tmp_path: Path, world: World) -> None:
    config = tiny_config(tmp_path, training={"log_every": 100, "save_every": 0})
    summary = tiny_trainer(config, 50, world=world, change=stop_at(tmp_path, 7)).train()
    assert (summary.steps, summary.stopped) == (8, True)
    assert summary.checkpoint == tmp_path / "checkpoints" / "step-000008"
    assert [row["step"] for row in rows(tmp_path)] == [8]


def test_a_row_is_written_once_the_next_step_is_queued(tmp_path: Path, world: World) -> None:
    written: dict[int, int] = {}

    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        written[at] = _rows_of(tmp_path)
        return batch

    summary = tiny_trainer(tiny_config(tmp_path), 5, world=world, change=change).train()
    # While step n captures, the device may still be at step n - 1, whose row therefore waits.
    assert written == {1: 0, 2: 0, 3: 1, 4: 2, 5: 3}
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert summary.last["step"] == 5


def test_a_stop_in_the_last_step_is_left_for_what_follows(tmp_path: Path, world: World) -> None:
    summary = tiny_trainer(tiny_config(tmp_path), 3, world=world, change=stop_at(tmp_path, 3)).train()
    assert (summary.steps, summary.stopped) == (3, False)
    assert (tmp_path / "stop").exists()


@pytest.mark.parametrize(("log_every", "kept"), [(1, [1, 2, 3]), (2, [2])])
def test_a_failure_loses_no_row_that_is_due(
    tmp_path: Path, world: World, log_every: int, kept: list[int]
) -> None:
    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch | None:
        return None if at == 4 else batch

    config = tiny_config(tmp_path, training={"log_every": log_every})
    with pytest.raises(ValueError, match="step 4 of 5: the stream of features has ended"):
        tiny_trainer(config, 5, world=world, change=change).train()
    assert [row["step"] for row in rows(tmp_path)] == kept


def train_ranks(folder: str, sharding: str) -> None:
    config = tiny_config(
        Path(folder),
        2,
        training={"sharding": sharding, "global_batch_size": 8, "batch_size": 2},
        tracking={"samples": True},
    )
    trainer = tiny_trainer(config, 3)
    trainer.train()
    trainer.world.close()


def test_a_stream_that_is_stopped_ends_the_run_after_whole_steps(tmp_path: Path, world: World) -> None:
    def stopped(step: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        if step == 3:
            raise StreamStopped("the producer was stopped")
        return batch

    config = tiny_config(tmp_path, training={"global_batch_size": 4})
    trainer = tiny_trainer(config, 6, world=world, change=stopped)
    summary = trainer.train()
    assert (summary.steps, summary.stopped) == (2, True)
    assert summary.checkpoint == tmp_path / "checkpoints" / "step-000002"
    later = tiny_trainer(config, 6, world=world)
    assert (later.train().start_step, later.step) == (2, 6)


def test_features_are_acknowledged_once_a_step(tmp_path: Path, world: World) -> None:
    config = tiny_config(tmp_path, training={"global_batch_size": 4})
    trainer = tiny_trainer(config, 3, world=world)
    assert isinstance(trainer.stream, TinyStream)
    trainer.train()
    assert trainer.stream.acknowledged == [1, 2, 3]


def test_one_rank_with_four_samples_equals_two_with_two(tmp_path: Path, world: World) -> None:
    run_ranks(train_ranks, 2, tmp_path / "logs", str(tmp_path / "two"), "grad_op")
    config = tiny_config(
        tmp_path / "one", training={"global_batch_size": 8, "batch_size": 4}, tracking={"samples": True}
    )
    tiny_trainer(config, 3, world=world).train()
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert len(one) == len(two) == 3
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-6), name
        assert 0 <= b["accuracy"] <= 1
    both = samples(tmp_path / "two", 0) + samples(tmp_path / "two", 1)
    assert sorted(both) == sorted(samples(tmp_path / "one", 0))
    expected = read_weights(tmp_path / "one")
    for name, value in read_weights(tmp_path / "two").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def unsupervised_step(step: int) -> Any:
    """A stream's `change` that takes all supervision from `step`."""

    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) if at == step else batch

    return change


def test_a_step_without_supervision_is_skipped_and_counted(tmp_path: Path, world: World) -> None:
    trainer = tiny_trainer(tiny_config(tmp_path), 2, world=world, change=unsupervised_step(2))
    weights: list[dict[str, Tensor]] = []
    for _ in range(2):
        trainer.train_step()
        trainer.log()
        weights.append({name: value.clone() for name, value in full_state(trainer.model).items()})
    summary = trainer.train()
    assert (summary.skipped, summary.dropped, summary.steps) == (1, 2, 2)
    assert [(row["loss"] > 0, row["skipped"]) for row in rows(tmp_path)] == [(True, 0), (False, 1)]
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name
        assert value.isfinite().all()


def test_unsupervised_samples_may_be_an_error(tmp_path: Path, world: World) -> None:
    config = tiny_config(tmp_path, training={"unsupervised": "error"})
    with pytest.raises(ValueError, match=r"sample-2, sample-3"):
        tiny_trainer(config, 2, world=world, change=unsupervised_step(2)).train()
    [error] = read_errors(tmp_path)
    assert (error["rank"], error["step"], error["type"], error["peer"]) == (0, 1, "ValueError", False)


def test_a_bad_gradient_names_its_step_and_spares_the_weights(tmp_path: Path, world: World) -> None:
    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        return replace(batch, hidden=batch.hidden * float("nan")) if at == 2 else batch

    trainer = tiny_trainer(tiny_config(tmp_path), 5, world=world, change=change)
    with pytest.raises(
        FloatingPointError, match=r"the gradient norm of step 2 is nan; its update was not applied"
    ):
        trainer.train()
    assert all(value.isfinite().all() for value in full_state(trainer.model).values())


@pytest.mark.parametrize("fault", ["short", "contract"])
def test_a_stream_that_breaks_its_contract_is_refused(tmp_path: Path, world: World, fault: str) -> None:
    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch:
        if fault == "short":
            return pack([sample(0, 0)])
        return replace(batch, spec=batch.spec.model_copy(update={"target_revision": "other"}))

    with pytest.raises(
        ValueError, match=r"required 2 of them|target_revision: 'tiny' \(this run\) != 'other'"
    ):
        tiny_trainer(tiny_config(tmp_path), 2, world=world, change=change).train()


def end_early(folder: str) -> None:
    def change(at: int, rank: int, batch: FeatureBatch) -> FeatureBatch | None:
        return None if rank == 1 and at == 5 else batch

    config = tiny_config(Path(folder), 2, training={"batch_size": 1})
    tiny_trainer(config, 5, change=change).train()


def test_five_and_four_batches_on_two_ranks_end_both_with_the_reason(tmp_path: Path) -> None:
    ranks = start_ranks(end_early, 2, tmp_path / "logs", str(tmp_path))
    assert ranks.wait(120) == [1, 1]
    origin, follower = read_errors(tmp_path)
    reason = "rank 1, step 5 of 5: the stream of features has ended"
    assert (origin["rank"], origin["peer"], origin["step"]) == (1, False, 4)
    assert reason in origin["message"]
    assert (follower["rank"], follower["peer"]) == (0, True)
    assert reason in follower["message"]
    assert follower["time"] >= origin["time"] + 1
    assert [row["accuracy"] <= 1 for row in rows(tmp_path)] == [True] * len(rows(tmp_path))


def test_evaluation_while_training_decodes_a_whole_draft(tmp_path: Path, world: World) -> None:
    seen: list[nn.Module] = []

    def evaluate(draft: nn.Module) -> DecodeCounts:
        seen.append(draft)
        return DecodeCounts([3, 1, 0], [4, 3, 0], rounds=4, emitted=8, identical=2, total=2, tokens=9)

    events: list[dict[str, Any]] = []
    config = tiny_config(
        tmp_path,
        evaluation={"interval": 2, "prompts": "held-out.jsonl"},
        training={"log_every": 5, "save_every": 4},
    )
    trainer = tiny_trainer(config, 5, world=world, evaluate=evaluate, report=events.append)
    trainer.train()
    found = rows(tmp_path, "eval/tau")
    assert [row["step"] for row in found] == [2, 4]
    assert found[0] == {
        "step": 2,
        "eval/tau": 2.0,
        "eval/accept/0": 0.75,
        "eval/accept/1": pytest.approx(1 / 3),
        "eval/lossless_identical": 2,
        "eval/lossless_total": 2,
    }
    assert [row["step"] for row in rows(tmp_path)] == [2, 4, 5]
    # The draft that was decoded at step 4 is the one that the checkpoint of step 4 holds.
    for name, value in read_weights(tmp_path / "checkpoints" / "step-000004").items():
        assert torch.equal(seen[1].state_dict()[name], value)
    assert not any(parameter.requires_grad for parameter in seen[0].parameters())
    stages = [event["stage"] for event in events]
    assert stages.count("train") == 5
    assert [e["tau"] for e in events if e["stage"] == "evaluate"] == [2.0, 2.0]
    assert [e["step"] for e in events if e["stage"] == "checkpoint"] == [4, 5]


def test_a_row_holds_the_time_shares_and_no_mfu_on_an_unknown_device(tmp_path: Path, world: World) -> None:
    trainer = tiny_trainer(tiny_config(tmp_path), 1, world=world)
    row = trainer.train().last
    assert {
        "perf/samples_per_s",
        "perf/tokens_per_s",
        "perf/bubble_fraction",
        "perf/staged_bytes",
    } <= row.keys()
    assert "perf/mfu" not in row
    shares = [row[f"perf/{name}"] for name in ("capture_share", "train_share", "bubble_fraction")]
    assert sum(shares) == pytest.approx(1.0)


def train_until_killed(folder: str, steps: int) -> None:
    config = tiny_config(Path(folder), training={"save_every": 1}, tracking={"samples": True})
    trainer = tiny_trainer(config, steps)
    trainer.train()
    trainer.world.close()


def test_ten_kills_at_random_moments_repeat_and_skip_nothing(tmp_path: Path, world: World) -> None:
    steps, kills, killed = 24, 10, tmp_path / "killed"
    reached = []
    for _ in range(kills):
        ranks = start_ranks(train_until_killed, 1, tmp_path / "logs", str(killed), steps)
        seen = len(reached) and reached[-1]
        deadline = time.monotonic() + 60
        # Wait until this start trains, then let it run for a moment of the same length as a few saves.
        while _rows_of(killed) <= seen and ranks.processes[0].is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.uniform(0.0, 0.15))
        ranks.kill(0)
        ranks.wait(10)
        newest = newest_checkpoint(killed)
        reached.append(0 if newest is None else int(newest.name.removeprefix("step-")))
    assert reached == sorted(reached)
    run_ranks(train_until_killed, 1, tmp_path / "logs", str(killed), steps)
    whole = tiny_config(tmp_path / "whole", training={"save_every": 0}, tracking={"samples": True})
    tiny_trainer(whole, steps, world=world).train()
    assert samples(killed, 0) == samples(tmp_path / "whole", 0)
    assert rows(killed) == rows(tmp_path / "whole")
    expected = read_weights(tmp_path / "whole")
    for name, value in read_weights(killed).items():
        assert torch.equal(value, expected[name]), name


def _rows_of(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0
