"""Pass a long sample's states through sink, store and fetcher, and print throughput and peak memory.

    python scripts/bench_store.py                              5.25 GiB, a 64K row of Kimi K3, through files
    python scripts/bench_store.py --store mooncake             through Mooncake, with a master of its own
    python scripts/bench_store.py --device cuda                states on a GPU, pinned memory, side streams
    python scripts/bench_store.py --rows 4096 --samples 8      shorter samples, in a row

Producer and consumer are processes of their own, as in a disaggregated run. States appear chunk by chunk, as
in a chunked prefill. The consumer holds one sample, where a trainer does: in its output tensors. Mooncake's
objects lie in the producer's memory, and count there. At the end the last sample is compared with what was
captured, element by element.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import torch

from specforge_capture.fetch import Fetcher
from specforge_capture.refs import FeatureRef, feature_width
from specforge_capture.sink import Outcome, Sink
from specforge_capture.stores.base import open_store
from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.store import FileStore, MooncakeStore, parse_store

GIB = 1 << 30


def contract(hidden_size: int, layers: int) -> CaptureSpec:
    return CaptureSpec(
        method="dspark",
        layer_ids=tuple(range(layers - 1)),
        final_state=True,
        dtype="bfloat16",
        hidden_size=hidden_size,
        vocab_size=1024,
        target_revision="bench",
        tokenizer_hash="bench",
    )


class Prefill:
    """Chunks of states that a prefill would make, at the cost of a copy; each differs from the others."""

    def __init__(self, options: argparse.Namespace, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(-(2**15), 2**15, (options.chunk, width), dtype=torch.int16, generator=generator)
        # Integers below: NaN would equal nothing, itself included.
        self._noise = (noise % 256).bfloat16().to(device)
        self._rows, self._chunk = options.rows, options.chunk

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, rows) of one sample."""
        for number, start in enumerate(range(0, self._rows, self._chunk)):
            rows = self._noise[: self._rows - start].clone()
            rows[:, number % rows.shape[1]] = 256
            yield start, rows


def produce(options: argparse.Namespace) -> None:
    """Capture the samples, then keep them until the parent has no more use for them."""
    spec, device = contract(options.hidden_size, options.layers), torch.device(options.device)
    width = feature_width(spec)
    store = open_store(parse_store(options.settings), contribute=True)
    prefill = Prefill(options, width, device)  # starts the GPU, so that the ring is pinned
    sink = Sink(
        store,
        spec_hash(spec),
        width,
        spec.dtype,
        ring_bytes=options.ring_bytes,
        max_pending_bytes=options.ring_bytes,
    )
    told: Queue[Outcome] = Queue()
    before = peak_bytes()
    began = time.perf_counter()
    for sample in range(options.samples):
        capture = sink.open(f"bench/{sample}", str(sample), options.rows)
        for start, rows in prefill:
            capture.add(rows, start)
        capture.finish(told.put)
    refs = []
    for _ in range(options.samples):
        outcome = told.get()
        if isinstance(outcome, Exception):
            raise outcome
        refs.append(outcome.to_json())
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "before": before, "peak": peak_bytes(), "refs": refs}), flush=True)
    sys.stdin.read()
    sink.close()
    store.close()


def consume(options: argparse.Namespace) -> None:
    """Fetch the samples; verify the last one, element by element."""
    spec, device = contract(options.hidden_size, options.layers), torch.device(options.device)
    width = feature_width(spec)
    store = open_store(parse_store(options.settings), contribute=False)
    fetcher = Fetcher(store, spec, device, buffer_bytes=options.ring_bytes)
    out = torch.zeros(options.rows, width - spec.hidden_size, dtype=torch.bfloat16, device=device)
    last = torch.zeros(options.rows, spec.hidden_size, dtype=torch.bfloat16, device=device)
    out.fill_(0)  # the first touch of its pages is not the fetch's
    last.fill_(0)
    before = peak_bytes()
    refs = [FeatureRef.from_json(ref) for ref in json.loads(options.refs)]
    began = time.perf_counter()
    for ref in refs:
        fetcher.fetch(ref, out, last)
        if device.type == "cuda":
            torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = peak_bytes()
    for start, wanted in Prefill(options, width, device):
        rows = slice(start, start + len(wanted))
        if not torch.equal(torch.cat([out[rows], last[rows]], 1), wanted):
            sys.exit(f"rows {start} and following differ from what was captured")
    fetcher.close()
    for ref in refs:
        store.remove(ref.keys)
    store.close()
    print(json.dumps({"seconds": seconds, "before": before, "peak": peak}))


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def orchestrate(options: argparse.Namespace, settings: FileStore | MooncakeStore) -> None:
    spec = contract(options.hidden_size, options.layers)
    total = options.rows * options.samples * feature_width(spec) * 2
    shared = [sys.executable, __file__, *sys.argv[1:], "--settings", settings.model_dump_json()]
    environment = {"GLOG_minloglevel": "2", **os.environ}  # Mooncake tells of each connection
    with subprocess.Popen(
        [*shared, "--part", "produce"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as producer:
        assert producer.stdout is not None
        line = producer.stdout.readline()
        if not line:
            sys.exit("the producer failed")
        made = json.loads(line)
        consumer = subprocess.run(
            [*shared, "--part", "consume", "--refs", json.dumps(made["refs"])],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environment,
        )
        fetched = json.loads(consumer.stdout)
        producer.communicate()
    sample = total / options.samples / GIB
    print(f"{options.store}, {options.device}: {options.samples} x {sample:.2f} GiB, in pieces of", end=" ")
    print(f"{made['refs'][0]['piece_rows']} rows; ring and buffer {options.ring_bytes / GIB:.2f} GiB each")
    for name, part in (("capture", made), ("fetch", fetched)):
        gained = (part["peak"] - part["before"]) / GIB
        print(f"{name:8} {part['seconds']:6.1f} s {total / GIB / part['seconds']:6.2f} GiB/s", end="  ")
        print(f"peak resident {part['peak'] / GIB:.2f} GiB, {gained:.2f} of it since it began")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", choices=["files", "mooncake"], default="files")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--hidden-size", type=int, default=7168)
    parser.add_argument("--layers", type=int, default=6, help="captured states, the final one included")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=2048, help="rows that appear at a time")
    parser.add_argument("--ring-bytes", type=int, default=256 << 20)
    parser.add_argument("--folder", help="where files go; default: a temporary folder")
    parser.add_argument("--part", choices=["produce", "consume"], help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    parser.add_argument("--refs", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return (produce if options.part == "produce" else consume)(options)
    total = options.rows * options.samples * options.hidden_size * options.layers * 2
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.store == "files":
            return orchestrate(options, FileStore(kind="files", folder=folder))
        port, metrics = free_ports(2)
        master = MasterSettings(port=port, metrics_port=metrics)
        # Mooncake keeps free memory beside the objects: a sixteenth more than they take.
        room = total + max(total // 16, 256 << 20)
        settings = MooncakeStore(master=master.address, capacity_bytes=room, transfer_timeout_seconds=300)
        with running_master(master, Path(folder) / "master.log"):
            return orchestrate(options, settings)


if __name__ == "__main__":
    main()
