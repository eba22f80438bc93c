"""Colocated runs with SGLang on CPU ranks: two islands of two train as one rank does, and as `hf` does."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".cache" / "sglang-cpu"
INSTALL = ROOT / "scripts" / "sglang_cpu" / "install.py"
RECIPE = f"""\
target: {{path: {ROOT}/recipes/tiny-target, dtype: float32, backend: sglang}}
draft: {{num_layers: 1, target_layer_ids: [0, 2, 3], num_anchors: 16, markov: {{rank: 16}}}}
data: {{train: {ROOT}/recipes/tiny-chats/train.jsonl, max_length: 256}}
training: {{max_steps: 3, global_batch_size: 8, log_every: 1}}
tracking: {{samples: true}}
deployment: {{trainer: {{device: cpu}}}}
"""
WORLDS = {
    "islands": (
        "deployment.trainer.nproc_per_node=4",
        "engine.tp_size=2",
        "training.sharding=hybrid",
        "training.save_every=1",
    ),
    "alone": ("training.batch_size=4",),
    "hf": ("target.backend=hf", "training.batch_size=4"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def launcher() -> Path:
    """`specforge-launch` of the environment with SGLang; without the environment its tests are skipped."""
    if not (ENVIRONMENT / "built-from").is_file():
        raise pytest.skip.Exception(f"needs SGLang on a CPU: python3.11 {INSTALL.relative_to(ROOT)}")
    return ENVIRONMENT / "bin" / "specforge-launch"


@pytest.fixture(scope="module")
def runs(launcher: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output folder of each world's run; the islands decode held-out prompts too."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    held_out = f"evaluation.prompts={ROOT}/recipes/tiny-chats/eval.jsonl"
    decoding = (held_out, "evaluation.max_prompts=4", "evaluation.max_new_tokens=8", "evaluation.interval=0")
    for name, overrides in WORLDS.items():
        options = [*overrides, *(decoding if name == "islands" else ()), f"output_dir={folder / name}"]
        done = subprocess.run(
            [launcher, "run", recipe, *options, f"data.cache_dir={folder / 'prompts'}"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            timeout=300,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-8000:]
    return {name: folder / name for name in WORLDS}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("other", ["alone", "hf"])
def test_islands_train_on_the_same_samples_to_the_same_losses(runs: dict[str, Path], other: str) -> None:
    mine, theirs = (rows_of(runs[name] / "metrics.jsonl") for name in ("islands", other))
    losses = [row["loss"] for row in mine if "loss" in row]
    assert len(losses) == 3
    # float32 sums in another order, over three steps of AdamW.
    assert losses == pytest.approx([row["loss"] for row in theirs if "loss" in row], rel=1e-4)
    norms = [row["grad_norm"] for row in mine if "loss" in row]
    assert norms == pytest.approx([row["grad_norm"] for row in theirs if "loss" in row], rel=1e-3)


def test_ranks_take_disjoint_slices_of_what_one_rank_takes(runs: dict[str, Path]) -> None:
    ranks = [rows_of(path) for path in sorted(runs["islands"].glob("samples.rank*.jsonl"))]
    (alone,) = (rows_of(path) for path in runs["alone"].glob("samples.rank*.jsonl"))
    assert len(ranks) == 4
    for step, together in zip(zip(*ranks, strict=True), alone, strict=True):
        taken = [tuple(sample) for rank in step for sample in rank["samples"]]
        assert len(set(taken)) == len(taken) == 8
        assert set(taken) == {tuple(sample) for sample in together["samples"]}


def test_both_islands_hold_the_same_parameters_after_each_step(runs: dict[str, Path]) -> None:
    """With each checkpoint replicas are compared bit for bit; one that differs would have ended the run."""
    checkpoints = {path.name for path in (runs["islands"] / "checkpoints").glob("step-*")}
    assert checkpoints == {"step-000002", "step-000003"}, "the newest two of one each step"
    assert json.loads((runs["islands"] / "summary.json").read_text())["replicas"] == 2


def test_nothing_is_left_in_shared_memory(runs: dict[str, Path]) -> None:
    for log in (runs["islands"] / "logs").glob("*.log"):
        assert "leaked" not in log.read_text()


def test_the_benchmark_runs_with_dummy_weights(launcher: Path, tmp_path: Path) -> None:
    """It needs a configuration alone: no weights and no tokenizer."""
    script = [launcher.parent / "python", ROOT / "scripts" / "bench_colocated.py", "--shapes", "tiny"]
    options = ["--steps", "3", "--folder", tmp_path, "--set", "deployment.trainer.device=cpu"]
    done = subprocess.run(
        [*script, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    figures = json.loads((tmp_path / "benchmark.json").read_text())
    assert (figures["steps"], figures["finite"], figures["exit_codes"]) == (3, True, [0])
    assert figures["startup_seconds"]["target/import"] > 0
    assert figures["windows"][0]["samples_per_s"] > 0
    assert "| losses | finite" in done.stdout
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert all(row["dummy_weights"] for row in rows)


def test_the_profile_of_a_step_prints(launcher: Path, tmp_path: Path) -> None:
    script = [launcher.parent / "python", ROOT / "scripts" / "profile_colocated.py", "--shapes", "tiny"]
    steps = ["--warm-up", "1", "--block", "1", "--profile", "1", "--folder", tmp_path]
    done = subprocess.run(
        [*script, *steps, "--set", "deployment.trainer.device=cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    for line in ("the host waits after each step: 2 steps", "the host runs ahead: 2 steps", "run_backward"):
        assert line in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 8))


def test_islands_share_the_evaluation(runs: dict[str, Path]) -> None:
    summary = json.loads((runs["islands"] / "summary.json").read_text())
    assert summary["lossless_identical"] == summary["lossless_total"] == 4
