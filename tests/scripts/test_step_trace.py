"""Device work, gaps and calls by phase, from events as torch.profiler writes them."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def step_trace(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("step_trace")


def event(category: str, name: str, start: float, length: float, correlation: int = 0) -> dict[str, Any]:
    arguments = {"correlation": correlation} if correlation else {}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 1, "args": arguments}


EVENTS = [
    event("user_annotation", "capture", 0, 100),
    event("user_annotation", "backward", 300, 100),
    event("user_annotation", "wait", 500, 50),
    event("cpu_op", "aten::to", 10, 40),
    event("cpu_op", "aten::_to_copy", 12, 30),
    event("cuda_runtime", "cudaMemcpyAsync", 15, 20, 1),
    event("cuda_runtime", "cudaLaunchKernel", 150, 5, 2),
    event("cuda_runtime", "cudaLaunchKernel", 310, 5, 3),
    event("cuda_runtime", "cudaLaunchKernel", 420, 5, 4),
    event("gpu_memcpy", "copy", 40, 10, 1),
    event("kernel", "forward kernel", 200, 300, 2),
    event("kernel", "on a second stream", 450, 100, 3),
    event("kernel", "update kernel", 600, 10, 4),
]


def test_work_belongs_to_the_phase_that_launched_it(step_trace: ModuleType) -> None:
    trace = step_trace.StepTrace(EVENTS)
    busy, gaps = trace.device_time()
    # What two streams do at once counts once, for the one that began first.
    assert busy == {"capture": 10, "forward": 300, "backward": 50, "update": 10}
    assert [(gap.start, gap.stop, gap.phase, gap.then) for gap in gaps] == [
        (50, 200, "forward", "forward kernel"),
        (550, 600, "update", "update kernel"),
    ]
    assert trace.launches() == {"capture": 1, "forward": 1, "backward": 1, "update": 1}
    assert trace.host_time() == {"capture": 100, "forward": 200, "backward": 100, "update": 100, "wait": 50}


def test_what_the_host_did(step_trace: ModuleType) -> None:
    trace = step_trace.StepTrace(EVENTS)
    assert trace.call_time() == [("cudaMemcpyAsync", [20]), ("cudaLaunchKernel", [5, 5, 5])]
    assert [trace.around(call) for call in trace.calls[:2]] == ["aten::_to_copy", "no operator"]
    assert trace.during(step_trace.Gap(20, 60, "forward", "")) == [
        ("aten::to", 30),
        ("aten::_to_copy", 22),
        ("cudaMemcpyAsync", 15),
    ]
    assert [trace.phase_at(moment) for moment in (None, 99, 101, 560)] == [
        "elsewhere",
        "capture",
        "forward",
        "elsewhere",
    ]


def test_the_profiler_writes_such_marks(step_trace: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in ("capture", "backward", "wait"):
            with record_function(name):
                torch.ones(8).sum()
            torch.ones(8).prod()
    profiler.export_chrome_trace(str(path))
    trace = step_trace.StepTrace(json.loads(path.read_text())["traceEvents"])
    spent = trace.host_time()
    assert set(spent) == {"capture", "forward", "backward", "update", "wait"}
    assert all(time > 0 for time in spent.values())
    assert trace.device_time() == ({}, [])
