#!/usr/bin/env python3
"""Time colocated DSpark training with SGLang in the trainer's process, at real shapes with dummy weights.

    python scripts/bench_colocated.py                                        # one GPU, 90 steps
    python scripts/bench_colocated.py --ranks 2 --tp 2 --steps 30            # one island of two
    python scripts/bench_colocated.py --ranks 2 --sharding hybrid --steps 30 # two islands, two replicas
    python scripts/bench_colocated.py --nodes 2 --ranks 4 --steps 30         # two launchers that meet
    python scripts/bench_colocated.py --shapes tiny --steps 30               # a rehearsal without a GPU

It writes a target's `config.json` and pre-tokenised random rows, runs the recipe qwen3-8b-dspark-colocated
over them by `specforge-launch run`, one row a rank and step, and reads the run's records. Row lengths are
log-normal between 43 and 185 below the limit of `--max-length`, both among the first rows; 30% of each row
are unsupervised. A row of metrics is written each step, once the next one is queued.

Every node of `--nodes` is a launcher of its own on this machine, with its own GPUs. `--set section.key=value`
changes any further setting of the recipe.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specforge_config.loading import load_run
from specforge_launch.machine import gpu_memory
from specforge_launch.plan import make_plan

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-dspark-colocated.yaml"
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
TINY: dict[str, Any] = QWEN3_8B | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 512,
}
TINY_DRAFT = (
    "draft.num_layers=1",
    "draft.target_layer_ids=[0, 2]",
    "draft.num_anchors=16",
    "draft.markov.rank=16",
    "draft.mask_token_id=511",
)
SHORTEST, BELOW_LIMIT = 43, 185
UNSUPERVISED = 0.3
WINDOWS = (1, 20, 50)
"""First steps of the windows that are reported; the last step ends all of them."""


def main() -> int:
    """Parse the command line, run, and report. Returns the run's exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=["8b", "tiny"], default="8b", help="of target and draft")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each node")
    parser.add_argument("--nodes", type=int, default=1, help="launchers, each with GPUs of its own")
    parser.add_argument("--tp", type=int, default=1, help="ranks of an island")
    shardings = ["no_shard", "grad_op", "full", "hybrid"]
    parser.add_argument("--sharding", choices=shardings, default="grad_op", help="of the draft")
    parser.add_argument("--steps", type=int, default=90, help="optimizer steps")
    parser.add_argument("--rows", type=int, help="rows of the file; default: what the steps take")
    parser.add_argument("--max-length", type=int, help="data.max_length; default 4096, tiny 512")
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench-colocated"), help="where it works")
    parser.add_argument("--json", type=Path, help="where figures go; default: benchmark.json in the folder")
    parser.add_argument("--limit", type=float, default=900, help="seconds after which the run is killed")
    parser.add_argument("--set", action="append", default=[], help="a further setting of the recipe")
    arguments = parser.parse_args()
    arguments.max_length = arguments.max_length or (4096 if arguments.shapes == "8b" else 512)
    folder = arguments.folder.absolute()
    overrides = prepare(arguments, folder)
    began = time.time()
    codes = launch(overrides, arguments, folder)
    figures = read_run(folder / "run", arguments, codes, time.time() - began)
    figures["bytes"]["predicted_peak"] = make_plan(load_run(RECIPE, overrides)).memory.total
    print(table(figures))
    path = arguments.json or folder / "benchmark.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return max(codes)


def prepare(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Write target and rows into a new folder; what the recipe is to be run with."""
    if (folder / "run").exists():
        raise SystemExit(f"{folder / 'run'} exists: remove it, or name another --folder")
    config = QWEN3_8B if arguments.shapes == "8b" else TINY
    (folder / "target").mkdir(parents=True, exist_ok=True)
    (folder / "target" / "config.json").write_text(json.dumps(config, indent=2))
    world = arguments.ranks * arguments.nodes
    rows = max(arguments.rows or 0, arguments.steps * world)
    write_rows(folder / "rows.jsonl", rows, arguments.max_length, config["eos_token_id"])
    settings = {
        "target.path": folder / "target",
        "data.train": folder / "rows.jsonl",
        "data.cache_dir": folder / "prompts",
        "data.max_length": arguments.max_length,
        "output_dir": folder / "run",
        "engine.load_format": "dummy",
        "engine.tp_size": arguments.tp,
        "training.sharding": arguments.sharding,
        "training.epochs": 1,
        "training.max_steps": arguments.steps,
        "training.global_batch_size": "null",
        "training.log_every": 1,
        "training.save_every": 0,
        "evaluation.prompts": "[]",
        "evaluation.interval": 0,
        "deployment.trainer.nproc_per_node": arguments.ranks,
        "deployment.trainer.nnodes": arguments.nodes,
    }
    if arguments.attention:
        settings["engine.attention_backend"] = arguments.attention
    if arguments.nodes > 1:
        settings["deployment.trainer.rendezvous"] = f"127.0.0.1:{free_port()}"
    tiny = TINY_DRAFT if arguments.shapes == "tiny" else ()
    return [*(f"{name}={value}" for name, value in settings.items()), *tiny, *arguments.set]


def write_rows(path: Path, count: int, max_length: int, vocabulary: int) -> None:
    """Random rows of log-normal lengths, the first two of the shortest and the longest."""
    draws, longest = np.random.default_rng(0), max_length - BELOW_LIMIT
    lengths = draws.lognormal(np.log(longest / 6), 0.8, count).round().clip(SHORTEST, longest).astype(int)
    lengths[:2] = (SHORTEST, longest)[:count]
    with path.open("w") as file:
        for length in lengths:
            supervised = np.arange(length) >= UNSUPERVISED * length
            row = {
                "input_ids": draws.integers(0, vocabulary, length).tolist(),
                "loss_mask": supervised.astype(int).tolist(),
            }
            file.write(json.dumps(row) + "\n")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(overrides: Sequence[str], arguments: argparse.Namespace, folder: Path) -> list[int]:
    """Run every node's launcher to its end; their exit codes. The first one shows the run here."""
    command = [sys.executable, "-m", "specforge_launch.cli", "run", str(RECIPE), *overrides]
    gpus, nodes = len(gpu_memory()), []
    for node in range(arguments.nodes):
        environment = dict(os.environ)
        if arguments.nodes > 1 and gpus:
            own = range(node * arguments.ranks, (node + 1) * arguments.ranks)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
        log = None if node == 0 else (folder / f"node-{node}.log").open("w")
        options = ["--node-rank", str(node)]
        nodes.append(subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=log))
    deadline = time.monotonic() + arguments.limit
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in nodes]
    except subprocess.TimeoutExpired:
        print(f"not done after {arguments.limit:.0f} s: killed", file=sys.stderr)
        return [1]
    finally:
        for process in nodes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)  # its ranks end with it
                process.wait()


def read_run(run: Path, arguments: argparse.Namespace, codes: list[int], seconds: float) -> dict[str, Any]:
    """What the run recorded, as far as it came."""
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    done = json.loads(summary.read_text()) if summary.is_file() else {}
    peaks = {name: max((row.get(f"perf/{name}", 0) for row in rows), default=0) for name in PEAKS}
    return {
        "ranks": arguments.ranks * arguments.nodes,
        "nodes": arguments.nodes,
        "tp_size": arguments.tp,
        "sharding": arguments.sharding,
        "shapes": arguments.shapes,
        "weights": "dummy",
        "steps": len(rows),
        "windows": [window(rows, first) for first in WINDOWS if first < len(rows)],
        "bytes": {name.removesuffix("_bytes"): value for name, value in peaks.items() if value},
        "loss_first": rows[0]["loss"] if rows else None,
        "loss_last": rows[-1]["loss"] if rows else None,
        "finite": bool(rows) and all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in rows),
        "replicas": done.get("replicas"),
        "first_step_seconds": done.get("first_step_seconds"),
        "startup_seconds": done.get("startup_seconds", {}),
        "seconds": seconds,
        "exit_codes": codes,
    }


PEAKS = ("staged_bytes", "peak_allocated", "peak_reserved", "peak_resident")


def window(rows: list[dict[str, Any]], first: int) -> dict[str, Any]:
    """Rates over the steps from `first` to the last, each weighted by its time."""
    part = [row for row in rows if row["step"] >= first]
    seconds = [row["perf/step_seconds"] for row in part]

    def mean(name: str) -> float:
        values = [row.get(name, 0.0) for row in part]
        return sum(value * spent for value, spent in zip(values, seconds, strict=True)) / sum(seconds)

    return {
        "first": first,
        "last": part[-1]["step"],
        "samples_per_s": sum(row["count"] for row in part) / sum(seconds),
        "tokens_per_s": mean("perf/tokens_per_s"),
        "capture": mean("perf/capture_share"),
        "train": mean("perf/train_share"),
        "bubble": mean("perf/bubble_fraction"),
        "captured_tokens_per_s": mean("perf/captured_tokens_per_s"),
        "mfu": mean("perf/mfu"),
    }


def table(figures: dict[str, Any]) -> str:
    """The figures as one Markdown table."""
    rows = {
        "ranks": f"{figures['ranks']} on {figures['nodes']} node(s), islands of {figures['tp_size']}, "
        f"{figures['sharding']}, {figures['shapes']} shapes, dummy weights",
    }
    for part in figures["windows"]:
        mfu = part["mfu"]
        rows[f"steps {part['first']}-{part['last']}"] = (
            f"{part['samples_per_s']:.2f} samples/s, {part['tokens_per_s']:.0f} tokens/s; capture "
            f"{part['capture']:.1%} / train {part['train']:.1%} / bubble {part['bubble']:.1%}; "
            f"captured {part['captured_tokens_per_s']:.0f} tokens/s" + (f"; MFU {mfu:.1%}" if mfu else "")
        )
    for name, value in figures["bytes"].items():
        rows[f"{name.replace('_', ' ')}, largest rank"] = f"{value / 2**30:.3f} GiB"
    if figures["first_step_seconds"]:
        parts = (f"{name} {spent:.1f}" for name, spent in figures["startup_seconds"].items())
        rows["seconds to the first step"] = f"{figures['first_step_seconds']:.1f}: {', '.join(parts)}"
    if figures["loss_first"] is not None:
        word = "finite" if figures["finite"] else "NOT FINITE"
        rows["losses"] = f"{word}, {figures['loss_first']:.3f} to {figures['loss_last']:.3f}"
    if figures["replicas"]:
        equal = "parameters equal bit for bit after the last step" if figures["replicas"] > 1 else "one copy"
        rows["replicas"] = f"{figures['replicas']}: {equal}"
    rows["steps done"] = f"{figures['steps']}"
    rows["seconds in all"] = f"{figures['seconds']:.1f}"
    rows["exit code"] = ", ".join(map(str, figures["exit_codes"]))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
