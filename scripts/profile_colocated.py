#!/usr/bin/env python3
"""Show where the time of a colocated training step goes, on one rank in this process.

    python scripts/profile_colocated.py --attention triton                # one GPU, Qwen3-8B's shapes
    python scripts/profile_colocated.py --shapes tiny --warm-up 4 --block 4 \\
        --set deployment.trainer.device=cpu                               # a rehearsal

The run is that of `bench_colocated.py`: the same rows, dummy weights, a row of metrics a step. After a
warm-up, blocks of steps take turns: in one kind the host waits for the device after every step, in the other
it runs ahead, as the trainer does. Then some steps run under torch.profiler, which slows the host down, and
some under cProfile. The run ends there, without a checkpoint.

A slow host shows around the blocks: the time of an empty Python loop and of a kernel's launch, before
anything is started and inside the run; time that the main thread was ready but did not run; time that the
hypervisor gave to others; garbage collection.
"""

import argparse
import cProfile
import gc
import io
import json
import pstats
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from bench_colocated import RECIPE, prepare
from step_trace import PHASES, StepTrace
from torch.profiler import ProfilerActivity, profile, record_function

from specforge_config.features import FeatureBatch
from specforge_config.loading import load_run
from specforge_launch import assembly, colocated
from specforge_train.trainer import Trainer

BLOCKS = {"waits": "the host waits after each step", "ahead": "the host runs ahead"}
ROUNDS = 2
"""Blocks of each kind, in turns."""
LENGTHS = (256, 512, 1024, 2048, 1 << 20)
"""Rows are shown apart by tokens, below each of these."""


def main() -> int:
    """Parse the command line, train, and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", choices=["8b", "tiny"], default="8b", help="of target and draft")
    parser.add_argument("--warm-up", type=int, default=40, help="steps before anything is measured")
    parser.add_argument("--block", type=int, default=40, help="steps of each of the four blocks")
    parser.add_argument("--profile", type=int, default=6, help="steps under each profiler")
    parser.add_argument("--attention", help="SGLang's attention backend; default: its own choice")
    parser.add_argument("--max-length", type=int, help="data.max_length; default 4096, tiny 512")
    parser.add_argument(
        "--folder", type=Path, default=Path("outputs/profile-colocated"), help="where it works"
    )
    parser.add_argument("--set", action="append", default=[], help="a further setting of the recipe")
    arguments = parser.parse_args()
    arguments.max_length = arguments.max_length or (4096 if arguments.shapes == "8b" else 512)
    arguments.ranks = arguments.nodes = arguments.tp = 1
    arguments.sharding, arguments.rows = "grad_op", None
    arguments.steps = arguments.warm_up + len(BLOCKS) * ROUNDS * arguments.block + 2 * arguments.profile
    calibrate("in a fresh process")
    config = load_run(RECIPE, prepare(arguments, arguments.folder.absolute()))
    Path(config.folder).mkdir(parents=True)
    ProfiledTrainer.plan = arguments
    assembly.Trainer = ProfiledTrainer  # ty: ignore[invalid-assignment]
    torch.Tensor.backward = record_function("backward")(torch.Tensor.backward)
    try:
        colocated.run(config, time.time())
    except MeasuredEnough:
        return 0
    raise SystemExit("the run ended before its steps were measured")


class MeasuredEnough(SystemExit):
    """Ends the run."""


class ProfiledTrainer(Trainer):
    """Trains as the trainer does, and looks on. `plan` holds the command line."""

    plan: ClassVar[argparse.Namespace]

    def train_step(self) -> None:
        """One step; once the warm-up is over, all that is measured instead."""
        if self.step < self.plan.warm_up:
            return super().train_step()
        self.log()
        calibrate("inside the run")
        counted = [(kind, self._block(kind)) for _ in range(ROUNDS) for kind in BLOCKS]
        rows = [json.loads(line) for line in (Path(self.config.folder) / "metrics.jsonl").open()]
        for kind in BLOCKS:
            print_block(BLOCKS[kind], rows, [block for name, block in counted if name == kind])
        self._trace()
        self._functions()
        calibrate("at the end")
        self.world.close()
        raise MeasuredEnough

    @record_function("capture")
    def next_batch(self) -> FeatureBatch:
        """The next batch, marked as the capture."""
        return super().next_batch()

    @record_function("wait")
    def _settle(self) -> None:
        super()._settle()

    def _steps(self, count: int, *, ahead: bool = True) -> None:
        for _ in range(count):
            super().train_step()
            self.log_evaluate_save() if ahead else self.log()
        self.log()

    def _block(self, kind: str) -> dict[str, float]:
        """Train a block, and count what the host did; the device is at rest before and after."""
        before, began, first = host_counters(), time.perf_counter(), self.step + 1
        with garbage_collections() as collected:
            self._steps(self.plan.block, ahead=kind == "ahead")
        seconds = time.perf_counter() - began
        spent = {name: after - before[name] for name, after in host_counters().items()}
        return {"first": first, "last": self.step, "seconds": seconds, "gc": sum(collected), **spent}

    def _trace(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        path = Path(self.config.folder) / "trace.json"
        with profile(activities=activities) as profiler:
            self._steps(self.plan.profile)
        profiler.export_chrome_trace(str(path))
        print_trace(StepTrace(json.loads(path.read_text())["traceEvents"]), self.plan.profile)

    def _functions(self) -> None:
        """The main thread's functions by their own time; the backward runs in another one."""
        profiler, text = cProfile.Profile(), io.StringIO()
        profiler.runcall(self._steps, self.plan.profile)
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(14)
        lines = [line[:150] for line in text.getvalue().splitlines() if line.strip()]
        print(f"\n{self.plan.profile} steps of the main thread under cProfile", *lines[-15:], sep="\n")


def calibrate(where: str) -> None:
    """Print what an empty Python loop, a kernel's launch and a small copy from pageable memory take."""

    def mean(count: int, work: Callable[[], object]) -> float:
        work()
        began = time.perf_counter()
        for _ in range(count):
            work()
        return 1e6 * (time.perf_counter() - began) / count

    text = (
        f"{where}: a thousand turns of a Python loop {mean(200, lambda: [None for _ in range(1000)]):.1f} us"
    )
    if torch.cuda.is_available():
        small, large = torch.zeros(8, device="cuda"), torch.ones(8192, 8192, device="cuda")
        text += f", a launch {mean(2000, lambda: small.add_(1)):.1f} us"
        torch.mm(large, large)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            torch.mm(large, large)
        torch.tensor([1, 2, 3]).to("cuda", non_blocking=True)
        copied = time.perf_counter() - began
        torch.cuda.synchronize()
        text += f", a pageable copy behind {1e3 * (time.perf_counter() - began):.0f} ms of work"
        text += f" returned after {1e3 * copied:.1f} ms"
    print(text, flush=True)


def host_counters() -> dict[str, float]:
    """Seconds and numbers so far: what this thread, process and machine spent."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    machine = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    schedule = Path("/proc/thread-self/schedstat")
    return {
        "main": time.thread_time(),
        "process": time.process_time(),
        "ready": int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0,
        "stolen": int(machine[8]) / 100,
        "yielded": float(usage.ru_nvcsw),
        "preempted": float(usage.ru_nivcsw),
        "faults": float(usage.ru_minflt + usage.ru_majflt),
    }


@contextmanager
def garbage_collections() -> Generator[list[float]]:
    """Seconds of each garbage collection in the body."""
    spent, began = [], [0.0]

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            spent.append(time.perf_counter() - began[0])

    gc.callbacks.append(note)
    yield spent
    gc.callbacks.remove(note)


def print_block(title: str, rows: Sequence[dict[str, Any]], blocks: Sequence[dict[str, float]]) -> None:
    """One kind's figures: the device's from the rows of metrics, the host's from its counters."""
    inside = [row for row in rows if any(b["first"] <= row["step"] <= b["last"] for b in blocks)]
    host = {name: sum(block[name] for block in blocks) for name in blocks[0]}
    each = 1e3 / len(inside)
    print(f"\n{title}: {len(inside)} steps, {host['seconds'] * each:.1f} ms a step by the host's clock")
    print(
        f"  milliseconds of a step: main thread on a processor {host['main'] * each:.1f}, all threads "
        f"{host['process'] * each:.1f}, main thread ready but not running {host['ready'] * each:.2f}, "
        f"garbage collection {host['gc'] * each:.2f}, stolen from the machine {host['stolen'] * each:.1f}"
    )
    print(
        f"  times a step: main thread gave way {host['yielded'] / len(inside):.1f}, was preempted "
        f"{host['preempted'] / len(inside):.1f}, page faults {host['faults'] / len(inside):.0f}"
    )
    by_length: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in inside:
        by_length[next(limit for limit in LENGTHS if tokens(row) < limit)].append(row)
    parts = {f"rows below {limit}": by_length[limit] for limit in LENGTHS if by_length[limit]}
    for name, part in {"all rows": inside, **parts}.items():
        print(f"  {name}, {len(part)} of {sum(map(tokens, part)) / len(part):.0f} tokens: {times(part)}")


def tokens(row: dict[str, Any]) -> float:
    """Tokens of a row of metrics over one step."""
    return row["perf/tokens_per_s"] * row["perf/step_seconds"]


def times(rows: Sequence[dict[str, Any]]) -> str:
    """Means of steps on the device."""
    steps = [1e3 * row["perf/step_seconds"] for row in rows]
    shares = {"capture": "capture_share", "train": "train_share", "between": "bubble_fraction"}
    means = {
        name: sum(row[f"perf/{share}"] * step for row, step in zip(rows, steps, strict=True)) / len(rows)
        for name, share in shares.items()
    }
    text = ", ".join(f"{name} {mean:.1f}" for name, mean in means.items())
    return f"{sum(steps) / len(steps):.1f} ms ({min(steps):.0f} to {max(steps):.0f}): {text}"


def print_trace(trace: StepTrace, steps: int) -> None:
    """Phases, gaps and calls of profiled steps."""
    host, launches, (busy, gaps) = trace.host_time(), trace.launches(), trace.device_time()
    idle: dict[str, float] = defaultdict(float)
    for gap in gaps:
        idle[gap.phase] += gap.stop - gap.start
    print(f"\n{steps} steps under torch.profiler, which slows the host; milliseconds and kernels of a step")
    print("phase       host  device busy  idle before it  kernels")
    for phase in PHASES:
        spent = [part.get(phase, 0.0) / steps / 1e3 for part in (host, busy, idle)]
        print(f"{phase:<9} {spent[0]:6.1f} {spent[1]:12.1f} {spent[2]:15.1f} {launches[phase] / steps:8.0f}")
    print(
        f"all              {sum(busy.values()) / steps / 1e3:12.1f} {sum(idle.values()) / steps / 1e3:15.1f}"
    )
    for gap in gaps[:10]:
        meanwhile = ", ".join(f"{name[:40]} {spent / 1e3:.2f}" for name, spent in trace.during(gap))
        print(f"idle {(gap.stop - gap.start) / 1e3:.2f} before {gap.then[:40]} ({gap.phase}): {meanwhile}")
    for name, spent in trace.call_time()[:8]:
        print(
            f"{name}: {len(spent) / steps:.0f} calls, {sum(spent) / steps / 1e3:.2f} ms, the longest "
            f"{max(spent) / 1e3:.2f} ms"
        )
    for call in sorted(trace.calls, key=lambda call: -call["dur"])[:12]:
        where = f"{trace.around(call)}, {trace.phase_at(call['ts'])}"
        print(f"{call['name']} took {call['dur'] / 1e3:.2f} ms in {where}")


if __name__ == "__main__":
    sys.exit(main())
