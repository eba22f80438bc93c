#!/usr/bin/env python3
"""Compare capture over HTTP, by an SGLang server with our plugin, with capture in process, prompt for prompt.

    python scripts/bench_capture_server.py                             # Qwen3-8B's shapes, random weights
    python scripts/bench_capture_server.py --shapes tiny --groups 4    # rehearses it, on a CPU too

One after the other, so that each has the device for itself: an engine in this process's child captures groups
of prompts, each in one prefill; then a server captures them all, from as many clients as a group has prompts,
times two, and stores their features as files, in memory by default. Features of both are compared. Time in
process ends with the states on the device; over HTTP, with their objects readable.

Where specforge-capture lies on the path without being installed, SGLang would not find the plugin: its
metadata is then written beside.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

import bench_capture
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from specforge_capture.refs import FeatureRef
from specforge_capture.sglang.engine_args import CONTEXT_HEADROOM
from specforge_capture.sglang.leftovers import mapped_by_group, remove_unmapped
from specforge_capture.spec import resolve_capture_spec
from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.stores.master import free_ports
from specforge_capture.targets.base import PromptRow
from specforge_capture.wire import CaptureClient
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.run import RunConfig
from specforge_config.store import FileStore
from specforge_config.target import read_target_shape

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
LENGTHS = (500, 1500)
"""Shortest and longest prompt: a group has some 8,000 tokens."""
COMPARED = 3
START_SECONDS = 400


def main() -> None:
    """Parse the command line and run both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=["tiny", "8b"], default="8b", help="of the target")
    parser.add_argument("--groups", type=int, default=12, help=f"groups of {GROUP} prompts")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds over all groups, after one more")
    parser.add_argument("--store", type=Path, default=Path("/dev/shm"), help="where features are stored")
    parser.add_argument("--in-process", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_process:
        in_process(arguments.in_process, arguments)
        return
    with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory(dir=arguments.store) as features:
        folder = Path(work)
        write_target(folder, arguments.shapes)
        command = [sys.executable, __file__, *sys.argv[1:], "--in-process", str(folder)]
        subprocess.run(command, check=True)
        alone = json.loads((folder / "in-process.json").read_text())
        over_http = served(folder, FileStore(kind="files", folder=features), arguments)
    show({"in_process_tokens_per_s": alone, "http_tokens_per_s": over_http})
    show({"http_over_in_process": round(max(over_http) / max(alone), 3)})


def write_target(folder: Path, shapes: str) -> None:
    """A target without weights."""
    config = {"tiny": bench_capture.TINY, "8b": bench_capture.QWEN3_8B}[shapes]
    config.architectures = ["Qwen3ForCausalLM"]
    config.dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    config.save_pretrained(folder)


def groups(folder: Path, count: int) -> list[list[PromptRow]]:
    """The prompts, the same in both parts."""
    draws = np.random.default_rng(0)
    lengths = draws.integers(*LENGTHS, count * GROUP, endpoint=True).tolist()
    rows = bench_capture.make_rows(lengths, read_target_shape(folder).vocab_size)
    return [rows[first : first + GROUP] for first in range(0, len(rows), GROUP)]


def in_process(folder: Path, arguments: argparse.Namespace) -> None:
    """Time the engine; leaves its tokens/s of each round, and the features that are compared, in `folder`."""
    device = bench_capture.start_world()
    own = argparse.Namespace(what="speed", tp_size=1, attention=None)
    target = bench_capture.start_target(folder, arguments.shapes, device, own)
    batches = groups(folder, arguments.groups)
    tokens = sum(len(row.input_ids) for batch in batches for row in batch)
    rates = []
    for _ in range(arguments.rounds + 1):
        bench_capture.synchronize(device)
        began = time.perf_counter()
        for batch in batches:
            target.capture(batch)
        bench_capture.synchronize(device)
        rates.append(round(tokens / (time.perf_counter() - began)))
    batch = target.capture(batches[0])
    assert batch.last_hidden is not None
    torch.save(torch.cat([batch.hidden, batch.last_hidden], dim=-1).cpu(), folder / "features.pt")
    (folder / "in-process.json").write_text(json.dumps(rates[1:]))
    target.close()
    dist.destroy_process_group()


def served(folder: Path, store: FileStore, arguments: argparse.Namespace) -> list[int]:
    """Tokens/s of each round over HTTP; compares the first features with those in `folder`."""
    rows = [row for batch in groups(folder, arguments.groups) for row in batch]
    prompts = [row.input_ids.tolist() for row in rows]
    spec = contract(folder, arguments.shapes)
    reader = open_store(store, contribute=False)
    rates = []
    with running_server(folder, store, spec) as client, ThreadPoolExecutor(2 * GROUP) as clients:
        client.describe().require(spec)
        for round_ in range(arguments.rounds + 1):
            keys = [f"bench/{round_}-{index}-0" for index in range(len(prompts))]
            began = time.perf_counter()
            refs = list(
                clients.map(lambda key, ids: client.capture(key, key, ids, spec_hash(spec)), keys, prompts)
            )
            rates.append(round(sum(map(len, prompts)) / (time.perf_counter() - began)))
            if round_ == 0:
                found = torch.cat([read(reader, ref) for ref in refs[:COMPARED]])
                error = bench_capture.relative(found, torch.load(folder / "features.pt")[: len(found)])
                show({"rows_compared": len(found), "relative_difference": error})
                if not error <= bench_capture.TOLERANCE[spec.dtype]:
                    raise SystemExit("features over HTTP are not those captured in process")
            reader.remove_prefix("bench/")
    return rates[1:]


def contract(folder: Path, shapes: str) -> CaptureSpec:
    """The contract that `bench_capture` resolves for its own run."""
    config = RunConfig.model_validate(
        {
            "target": {"path": str(folder), "backend": "sglang"},
            "draft": {"target_layer_ids": bench_capture.LAYERS[shapes]},
            "data": {"train": ["none.jsonl"]},
        }
    )
    return resolve_capture_spec(config, read_target_shape(folder), "none")


def read(store: FeatureStore, ref: FeatureRef) -> Tensor:
    """[rows, width] features of a ref."""
    rows = torch.empty(ref.rows, ref.width, dtype=getattr(torch, ref.dtype))
    store.get_into([(key, rows[first:last]) for key, first, last, _ in ref.pieces()])
    return rows


@contextmanager
def running_server(folder: Path, store: FileStore, spec: CaptureSpec) -> Generator[CaptureClient]:
    """A capture server of the target in `folder`, killed with all its processes at the end."""
    (port,), log = free_ports(1), folder / "server.log"
    on_gpu = torch.cuda.is_available()
    options = {
        "model-path": folder,
        "load-format": "dummy",
        "dtype": spec.dtype,
        "device": "cuda" if on_gpu else "cpu",
        "attention-backend": "triton" if on_gpu else "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "mem-fraction-static": 0.6,
        "context-length": LENGTHS[1] + CONTEXT_HEADROOM,
        "max-total-tokens": 65536,
        "chunked-prefill-size": 8192,
        "random-seed": RunConfig.model_fields["seed"].default,
        "host": "127.0.0.1",
        "port": port,
        "spec-capture-spec": spec.model_dump_json(),
        "spec-capture-store": store.model_dump_json(),
    }
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    switches = ("--skip-tokenizer-init", "--disable-cuda-graph", "--disable-radix-cache")
    command = [sys.executable, "-m", "sglang.launch_server", *line, *switches, "--enable-spec-capture"]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", process)
        yield CaptureClient(f"http://127.0.0.1:{port}", timeout=120)
    except BaseException:
        print(log.read_text(errors="replace")[-8000:], file=sys.stderr)
        raise
    finally:
        shared = mapped_by_group(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        remove_unmapped(shared)


def environment(folder: Path) -> dict[str, str]:
    """What the server's processes need: the plugin's metadata, and on a CPU the cores to run on."""
    found: dict[str, str] = {}
    if not entry_points(group="sglang.srt.plugins", name="specforge_capture"):
        project = tomllib.loads((ROOT / "packages/specforge-capture/pyproject.toml").read_text())["project"]
        entries = project["entry-points"]["sglang.srt.plugins"]
        metadata = folder / "metadata" / f"specforge_capture-{project['version']}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
        lines = ["[sglang.srt.plugins]", *(f"{name} = {value}" for name, value in entries.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        found["PYTHONPATH"] = os.pathsep.join([str(metadata.parent), os.environ.get("PYTHONPATH", "")])
    if not torch.cuda.is_available():
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        found |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": cores}
    return found


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=20):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"the server ended with {process.poll()} before it answered")


def show(values: dict[str, object]) -> None:
    """Print one line of JSON."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
