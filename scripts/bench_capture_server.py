#!/usr/bin/env python3
"""Compare capture over HTTP with capture in process: the same prompts, engine and target, in turn.

    python scripts/bench_capture_server.py                       # Qwen3-8B's shapes, random weights
    python scripts/bench_capture_server.py --store mooncake      # through Mooncake, with a master of its own
    python scripts/bench_capture_server.py --shapes tiny --device cpu --python .cache/sglang-cpu/bin/python

In process, one prefill takes `--together` rows and its states stay on the device. Over HTTP, a stock SGLang
server with the plugin has as many requests in flight; its states go through the sink into a store, and each
answer is acknowledged by removing its objects. `--python` is the interpreter with SGLang.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from bench_colocated import QWEN3_8B, TINY

from specforge_capture.sglang.engine_args import engine_environment
from specforge_capture.spec import resolve_capture_spec
from specforge_capture.stores.base import open_store
from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_capture.wire import CaptureClient
from specforge_config.deployment import Disaggregated
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape
from specforge_launch.services import server_command

LAYERS = {"8b": (1, 9, 17, 25, 33), "tiny": (0, 2)}
SHORTEST = 43


def main() -> None:
    """Parse the command line, time both ways, print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=["8b", "tiny"], default="8b", help="of the target")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="where it computes")
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--prompts", type=int, default=192, help="how many are captured, each way and round")
    parser.add_argument("--max-length", type=int, default=4096, help="longest prompt")
    parser.add_argument("--together", type=int, default=8, help="rows of a prefill, requests in flight")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one that is not")
    parser.add_argument(
        "--store", choices=["files", "mooncake"], default="files", help="what the server fills"
    )
    parser.add_argument("--folder", help="where files go; default: /dev/shm")
    parser.add_argument("--python", default=sys.executable, help="interpreter with SGLang")
    parser.add_argument(
        "--start-limit", type=float, default=400, help="seconds that a server may take to start"
    )
    parser.add_argument("--part", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        return capture_in_process(arguments, json.loads(arguments.part))
    with tempfile.TemporaryDirectory(dir=arguments.folder or "/dev/shm") as folder:
        compare(arguments, Path(folder))


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """Time both, one after the other, as one device holds one target of that size."""
    shape = QWEN3_8B if arguments.shapes == "8b" else TINY
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 40960}))
    lengths = draw_lengths(arguments)
    print(json.dumps({"prompts": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}), flush=True)
    command = [arguments.python, __file__, *sys.argv[1:], "--part", json.dumps(str(folder))]
    inside = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])
    show("in process", inside, sum(lengths))
    over = capture_over_http(arguments, folder, lengths)
    show("over HTTP", over, sum(lengths))
    print(json.dumps({"http_over_in_process": round(min(inside) / min(over), 3)}))


def show(way: str, seconds: list[float], tokens: int) -> None:
    """Print a way's rates."""
    rates = [round(tokens / took) for took in seconds]
    print(json.dumps({way: {"tokens_per_s": rates, "seconds": [round(s, 3) for s in seconds]}}), flush=True)


def draw_lengths(arguments: argparse.Namespace) -> list[int]:
    """Log-normal lengths from 43 to the limit."""
    draws = np.random.default_rng(7).lognormal(6.8, 0.9, arguments.prompts)
    return [int(length) for length in draws.clip(SHORTEST, arguments.max_length)]


def draw_prompts(lengths: list[int], vocab_size: int) -> list[np.ndarray]:
    """Random tokens, the same in each process."""
    draws = np.random.default_rng(8)
    return [draws.integers(0, vocab_size, length, dtype=np.int32) for length in lengths]


def make_config(arguments: argparse.Namespace, folder: Path, deployment: dict[str, Any]) -> RunConfig:
    """A run whose engine is timed."""
    return RunConfig.model_validate(
        {
            "target": {"path": str(folder), "backend": "sglang"},
            "draft": {"target_layer_ids": LAYERS[arguments.shapes]},
            "data": {"train": ["none.jsonl"], "max_length": arguments.max_length},
            "engine": {"attention_backend": arguments.attention, "load_format": "dummy"},
            "training": {"batch_size": arguments.together, "global_batch_size": arguments.together},
            "deployment": deployment,
        }
    )


def contract(config: RunConfig, folder: Path) -> CaptureSpec:
    """What is captured."""
    return resolve_capture_spec(config, read_target_shape(folder), "none")


def capture_in_process(arguments: argparse.Namespace, folder: str) -> None:
    """The first way, in a process of its own with SGLang; prints its seconds, a round each."""
    import torch
    import torch.distributed as dist

    from specforge_capture.sglang.local import SGLangTarget
    from specforge_capture.targets.base import PromptRow

    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    config = make_config(arguments, Path(folder), {"mode": "local_colocated"})
    shape = read_target_shape(folder)
    target = SGLangTarget(config, shape, contract(config, Path(folder)), device)
    prompts = draw_prompts(draw_lengths(arguments), shape.vocab_size)
    rows = [PromptRow(f"row {i}", ids, np.ones(len(ids), bool)) for i, ids in enumerate(prompts)]
    seconds = []
    for _ in range(arguments.rounds + 1):
        began = time.perf_counter()
        for first in range(0, len(rows), arguments.together):
            target.capture(rows[first : first + arguments.together])
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    target.close()
    dist.destroy_process_group()
    print(json.dumps(seconds[1:]), flush=True)


def capture_over_http(arguments: argparse.Namespace, folder: Path, lengths: list[int]) -> list[float]:
    """The second way; its seconds, a round each."""
    port, metrics, listen = free_ports(3)
    master, running = MasterSettings(port=port, metrics_port=metrics), nullcontext()
    store = {"kind": "files", "folder": str(folder / "features")}
    if arguments.store == "mooncake":
        room = 16 << 30 if arguments.shapes == "8b" else 1 << 28
        store = {"kind": "mooncake", "master": master.address, "capacity_bytes": room}
        running = running_master(master, folder / "master.log")
    deployment = {
        "mode": "disaggregated",
        "managed": True,
        "servers": {"python": arguments.python},
        "store": store,
        "producer": {"in_flight": arguments.together},
    }
    config = make_config(arguments, folder, deployment)
    assert isinstance(config.deployment, Disaggregated)
    spec, shape = contract(config, folder), read_target_shape(folder)
    command = server_command(config, shape, arguments.device, 0, listen, spec.model_dump_json())
    url, contract_hash = f"http://127.0.0.1:{listen}", spec_hash(spec)
    prompts = [ids.tolist() for ids in draw_prompts(lengths, shape.vocab_size)]
    with ExitStack() as held:
        held.enter_context(running)
        held.enter_context(serving(command, url, arguments, folder / "server.log"))
        features = held.enter_context(closing(open_store(config.deployment.store, contribute=False)))
        pool = held.enter_context(ThreadPoolExecutor(arguments.together))
        client = CaptureClient(url, 300)

        def capture(key: str, ids: list[int]) -> None:
            features.remove(client.capture(key, key, ids, contract_hash).keys)

        seconds = []
        for turn in range(arguments.rounds + 1):
            began = time.perf_counter()
            list(pool.map(capture, (f"bench/{turn}-{i}" for i in range(len(prompts))), prompts))
            seconds.append(time.perf_counter() - began)
    return seconds[1:]


@contextmanager
def serving(command: tuple[str, ...], url: str, arguments: argparse.Namespace, log: Path) -> Generator[str]:
    """A server that answers at `url`, ended with the context."""
    environment = {**os.environ, **engine_environment(arguments.device, 1)}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        ) as server,
    ):
        try:
            end = time.monotonic() + arguments.start_limit
            while not is_healthy(url):
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{log.read_text()[-6000:]}")
                time.sleep(0.5)
            yield url
        except Exception:
            print(log.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            os.killpg(server.pid, 9)


def is_healthy(url: str) -> bool:
    """Whether the server answers."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
