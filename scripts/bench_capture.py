#!/usr/bin/env python3
"""Check and time capture by the `sglang` target backend, in process, on this machine's device.

    python scripts/bench_capture.py check                      # a tiny target's states against transformers
    python scripts/bench_capture.py speed                      # Qwen3-8B's shapes, random weights
    torchrun --nproc-per-node=2 scripts/bench_capture.py speed --tp-size 2

Each call starts one engine, as one engine lives in a process; above one rank, ranks form islands of
`--tp-size`. `check` computes in bfloat16 on a GPU, where states differ from transformers' by rounding (one
per cent and less of their norm), and in float32 on a CPU. `--shapes tiny` rehearses `speed` where there is no
GPU.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from specforge_capture.sglang.local import SGLangTarget
from specforge_capture.spec import resolve_capture_spec
from specforge_capture.targets.base import PromptRow
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape

TINY = Qwen3Config(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
LAYERS = {"tiny": (3, 0, 2), "8b": (1, 9, 17, 25, 33)}
CHECKED = (5, 130, 17, 700, 1)
TIMED = ([700], [1024], [2048], [3911], [916] * 4, [500] * 8)
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}
"""Largest error relative to the norm of a row's states."""


def main() -> None:
    """Parse the command line, start a target and run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["check", "speed"])
    parser.add_argument("--shapes", choices=["tiny", "8b"], default="8b", help="of the target that is timed")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks of an island")
    parser.add_argument("--attention", help="SGLang's attention backend; default: triton on a GPU")
    parser.add_argument("--repeat", type=int, default=8, help="timed captures of each batch")
    arguments = parser.parse_args()
    device = start_world()
    shapes = "tiny" if arguments.what == "check" else arguments.shapes
    folder = write_target(shapes, device, with_weights=arguments.what == "check")
    target = start_target(folder, shapes, device, arguments)
    startup = {part: round(seconds, 2) for part, seconds in target.startup.seconds.items()}
    show({"startup_seconds": startup})
    if arguments.what == "check":
        check(target, folder)
    else:
        speed(target, arguments.repeat)
    target.close()
    dist.destroy_process_group()


def start_world() -> torch.device:
    """Join torchrun's process group, or make one of this process alone; returns the rank's device."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def write_target(shapes: str, device: torch.device, *, with_weights: bool) -> Path:
    """A target's folder, written by rank 0; without weights, its configuration alone."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    folder = Path(name[0])
    if dist.get_rank() == 0:
        config = {"tiny": TINY, "8b": QWEN3_8B}[shapes]
        config.architectures = ["Qwen3ForCausalLM"]
        config.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if with_weights:
            torch.manual_seed(0)
            Qwen3ForCausalLM(config).to(config.dtype).save_pretrained(folder)
        else:
            config.save_pretrained(folder)
    dist.barrier()
    return folder


def start_target(
    folder: Path, shapes: str, device: torch.device, arguments: argparse.Namespace
) -> SGLangTarget:
    """The engine of this rank's island, with room for the largest timed batch."""
    attention = arguments.attention or ("triton" if device.type == "cuda" else None)
    rows = max(map(len, TIMED))
    config = RunConfig.model_validate(
        {
            "target": {"path": str(folder), "backend": "sglang"},
            "draft": {"target_layer_ids": LAYERS[shapes]},
            "data": {"train": ["none.jsonl"], "max_length": max(map(max, TIMED))},
            "engine": {
                "tp_size": arguments.tp_size,
                "attention_backend": attention,
                "load_format": "auto" if arguments.what == "check" else "dummy",
            },
            "training": {"batch_size": -(-rows // arguments.tp_size)},
            "deployment": {"trainer": {"nproc_per_node": dist.get_world_size()}},
        }
    )
    shape = read_target_shape(folder)
    return SGLangTarget(config, shape, resolve_capture_spec(config, shape, "none"), device)


def make_rows(lengths: list[int] | tuple[int, ...], vocab_size: int) -> list[PromptRow]:
    """Random rows, the same on all ranks."""
    draws = np.random.default_rng(1)
    ids = [draws.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]
    return [PromptRow(f"row {i}", tokens, np.ones(len(tokens), bool)) for i, tokens in enumerate(ids)]


@torch.no_grad()
def check(target: SGLangTarget, folder: Path) -> None:
    """Compare captured and final states with transformers', and a decoding step's logits."""
    dtype = getattr(torch, target.spec.dtype)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(target.device).eval()
    outputs: dict[int, Tensor] = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(
            lambda _, inputs, output, layer=layer: outputs.update({layer: output[0]})
        )
    rows = make_rows(CHECKED, target.spec.vocab_size)
    batch = target.capture(rows)
    assert batch.last_hidden is not None
    errors: dict[str, float] = {}
    for index, row in enumerate(rows):
        own = slice(*batch.cu_seqlens[index : index + 2].tolist())
        tokens = torch.from_numpy(row.input_ids).long().to(target.device)
        final = model.model(tokens[None]).last_hidden_state[0]
        expected = [outputs[layer].view(len(tokens), -1) for layer in target.spec.layer_ids]
        found = batch.hidden[own].chunk(len(expected), dim=-1)
        pairs = {
            f"layer {layer}": pair
            for layer, *pair in zip(target.spec.layer_ids, found, expected, strict=True)
        }
        for name, (a, b) in {**pairs, "final": (batch.last_hidden[own], final)}.items():
            errors[name] = max(errors.get(name, 0.0), relative(a, b))
    ids = torch.from_numpy(rows[1].input_ids).long()
    with target.decoding() as leads:
        if leads:
            logits = target.extend(ids, target.start()).logits
            errors["logits"] = relative(logits, model(ids[None].to(target.device)).logits[0])
    show({"lengths": CHECKED, "dtype": target.spec.dtype, "relative_error": errors})
    worst, allowed = max(errors.values()), TOLERANCE[target.spec.dtype]
    if not worst <= allowed:
        raise SystemExit(f"states differ from transformers' by {worst:.2e}, allowed {allowed}")


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|, over all elements."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def speed(target: SGLangTarget, repeat: int) -> None:
    """Median seconds of a capture, for each batch of lengths."""
    for lengths in TIMED:
        rows = make_rows(lengths, target.spec.vocab_size)
        seconds, staged = [], 0
        for _ in range(repeat + 2):
            synchronize(target.device)
            dist.barrier()
            began = time.perf_counter()
            staged = target.capture(rows).state_bytes
            synchronize(target.device)
            seconds.append(time.perf_counter() - began)
        median = statistics.median(seconds[2:])
        show(
            {
                "rows": len(lengths),
                "tokens": sum(lengths),
                "milliseconds": round(1e3 * median, 2),
                "tokens_per_s_per_island": round(sum(lengths) / median),
                "state_GiB": round(staged / 2**30, 4),
            }
        )
    if target.device.type == "cuda":
        peaks = {
            "peak_allocated_GiB": torch.cuda.max_memory_allocated() / 2**30,
            "peak_reserved_GiB": torch.cuda.max_memory_reserved() / 2**30,
        }
        show({name: round(value, 2) for name, value in peaks.items()})


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(values: dict[str, Any]) -> None:
    """Print one line of JSON, on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
