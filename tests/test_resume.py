"""What a resumed run owes: every planned sample exactly once, and nothing of another plan."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Ended, Launched, require_no_process

from specforge_capture.prompts.plan import PromptPlan
from specforge_config.deployment import TrainerNodes
from specforge_config.features import CaptureSpec
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape
from specforge_config.topology import Topology
from specforge_train.checkpoint import Checkpoints
from specforge_train.optim import build_adamw
from specforge_train.parallel import World, shard, start_world
from specforge_train.registry import get_method

STEPS, KILLED_AT, RANKS, BATCH = 60, 40, 2, 4
SHAPE = TargetShape(16, 32, 4, 2, 1, 8, 40, 64, 1e-6, 1e4, "float32", False)
SPEC = CaptureSpec(
    method="dspark",
    layer_ids=(0, 2),
    final_state=True,
    dtype="float32",
    hidden_size=16,
    vocab_size=40,
    target_revision="tiny",
    tokenizer_hash="tiny",
)
RUN: dict[str, Any] = {
    "target": {"path": "target", "backend": "sglang"},
    "draft": {"num_layers": 1, "target_layer_ids": [0, 2], "mask_token_id": 39, "markov": {"rank": 4}},
    "data": {"train": "train.jsonl"},
    "engine": {"tp_size": 2},
    "training": {"batch_size": 2},
    "deployment": {"trainer": {"nproc_per_node": 4}},
}


@pytest.mark.slow
def test_a_run_killed_at_step_40_of_60_takes_each_sample_once(launch: Callable[..., Launched]) -> None:
    """Launcher and ranks are killed between two checkpoints; steps after the last one are done again."""
    arguments = [
        f"deployment.trainer.nproc_per_node={RANKS}",
        "evaluation.prompts=[]",
        "evaluation.interval=0",
        "training.epochs=5",
        "data.group_by_length=8",
        f"training.max_steps={STEPS}",
        "training.save_every=25",
    ]
    run = launch("forty", *arguments)
    for pid in run.halt(KILLED_AT):
        os.kill(pid, signal.SIGKILL)
    run.process.send_signal(signal.SIGKILL)
    run.end(timeout=60)
    require_no_process(run.folder)
    saved = (run.folder / "checkpoints" / "latest").read_text()
    assert saved in ("step-000025", "step-000050")

    resumed = launch("forty", *arguments, "--resume", "required").end()
    assert resumed.code == 0, resumed
    assert [row["step"] for row in resumed.rows()] == list(range(1, STEPS + 1))
    ranks = [samples(resumed, rank) for rank in range(RANKS)]
    taken = [sample for step in zip(*ranks, strict=True) for part in step for sample in part]
    planned = [[epoch, position] for epoch in range(5) for position in range(48)]
    assert [sample[:2] for sample in taken] == planned[: STEPS * BATCH]
    for epoch in range(5):
        assert len({name for of, _, name in taken if of == epoch}) == 48


def samples(ended: Ended, rank: int) -> list[list[list[Any]]]:
    """A rank's samples, by step."""
    steps = ended.samples(rank)
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))
    return [part for _, part in steps]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    started = start_world(TrainerNodes(device="cpu", cpu_threads=1), Topology(1), "full")
    yield started
    started.close()


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with a checkpoint of `RUN`."""
    folder, config = tmp_path_factory.mktemp("run"), RunConfig.model_validate(RUN)
    method = get_method("dspark")
    with torch.device("meta"):
        model = method.build(method.resolve(config.draft, SHAPE, 39))
    shard(model, world, torch.float32).to_empty(device="cpu")
    open_with(folder, world, RUN, "rows").save(3, model, build_adamw(model, config.optimizer), {})
    return folder


def open_with(folder: Path, world: World, sections: dict[str, Any], rows: str) -> Checkpoints:
    config = RunConfig.model_validate(sections)
    return Checkpoints(folder, world, PromptPlan.of_run(config, 48, rows).record(), SPEC)


@pytest.mark.parametrize(
    ("changes", "rows", "difference"),
    [
        ({"seed": 7}, "rows", "seed: 7 (this run) != 42"),
        ({"data": {"train": "train.jsonl", "prompt_seed": 7}}, "rows", "prompt_seed: 7 (this run) != 42"),
        ({"training": {"batch_size": 1}}, "rows", "batch_size: 1 (this run) != 2"),
        ({"training": {"batch_size": 2, "epochs": 3}}, "rows", "epochs: 3 (this run) != 1"),
        (
            {"training": {"batch_size": 2, "global_batch_size": 16}},
            "rows",
            "accumulation: 2 (this run) != 1",
        ),
        ({"engine": {"tp_size": 4}}, "rows", "tp_size: 4 (this run) != 2"),
        ({"deployment": {"trainer": {"nproc_per_node": 2}}}, "rows", "islands: 1 (this run) != 2"),
        ({}, "other rows", "fingerprint: 'other rows' (this run) != 'rows'"),
    ],
)
def test_another_plan_is_refused_by_the_value_that_differs(
    folder: Path, world: World, changes: dict[str, Any], rows: str, difference: str
) -> None:
    assert open_with(folder, world, RUN, "rows").step == 3
    with pytest.raises(ValueError, match="belongs to another plan") as error:
        open_with(folder, world, RUN | changes, rows)
    assert difference in str(error.value)
