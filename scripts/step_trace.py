"""What a torch.profiler trace of training steps says: how busy the device was, where it ran empty, and what
the host did then.

The host's marks (`record_function`) cut a step into phases: `capture` and `backward` are marked, `forward`
lies between them, `update` between the backward and the mark `wait`. Work on the device belongs to the phase
in which the host launched it, found by the call that shares its correlation id, for it may run long after.
Work on several streams is merged before it is called busy. Times in the trace are microseconds.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

PHASES = ("capture", "forward", "backward", "update", "wait", "elsewhere")
MARKS = ("capture", "backward", "wait")
BETWEEN = {("capture", "backward"): "forward", ("backward", "wait"): "update"}
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")

Event = dict[str, Any]


@dataclass(frozen=True)
class Gap:
    """A time in which the device had nothing to do."""

    start: float
    stop: float
    phase: str
    """In which the host launched the work that ended it."""
    then: str
    """Name of that work."""


class StepTrace:
    """The events of a trace, by phase.

    Args:
        events: `traceEvents` of a chrome trace.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        whole = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: event["ts"])
        marks = [e for e in whole if e.get("cat") == "user_annotation" and e["name"] in MARKS]
        self._phases = sorted(_phases(marks))
        self._starts = [start for start, _, _ in self._phases]
        self.calls = [event for event in whole if event.get("cat") in CALLS]
        self._operators = [event for event in whole if event.get("cat") == "cpu_op"]
        launched = {_correlation(event): event["ts"] for event in self.calls}
        self._work = [
            (event, self.phase_at(launched.get(_correlation(event))))
            for event in whole
            if event.get("cat") in DEVICE
        ]

    def phase_at(self, moment: float | None) -> str:
        """The phase that the host was in."""
        if moment is not None and (index := bisect_right(self._starts, moment)):
            _, stop, phase = self._phases[index - 1]
            if moment <= stop:
                return phase
        return "elsewhere"

    def host_time(self) -> dict[str, float]:
        """Phase -> microseconds that the host spent in it."""
        spent: dict[str, float] = defaultdict(float)
        for start, stop, phase in self._phases:
            spent[phase] += stop - start
        return spent

    def device_time(self) -> tuple[dict[str, float], list[Gap]]:
        """(phase -> microseconds that the device worked for it, all gaps, the longest first)."""
        busy: dict[str, float] = defaultdict(float)
        gaps: list[Gap] = []
        end: float | None = None
        for event, phase in self._work:
            start, stop = event["ts"], event["ts"] + event["dur"]
            if end is not None and start > end:
                gaps.append(Gap(end, start, phase, event["name"]))
            busy[phase] += max(0.0, stop - (start if end is None else max(start, end)))
            end = stop if end is None else max(stop, end)
        return busy, sorted(gaps, key=lambda gap: gap.start - gap.stop)

    def launches(self) -> Counter[str]:
        """Phase -> kernels, copies and fills."""
        return Counter(phase for _, phase in self._work)

    def call_time(self) -> list[tuple[str, list[float]]]:
        """(name, microseconds of each) of the host's calls into CUDA, the costliest first."""
        spent: dict[str, list[float]] = defaultdict(list)
        for event in self.calls:
            spent[event["name"]].append(event["dur"])
        return sorted(spent.items(), key=lambda row: -sum(row[1]))

    def around(self, call: Event) -> str:
        """The innermost operator in which a call was made."""
        outer = [
            event
            for event in self._operators
            if event.get("tid") == call.get("tid") and event["ts"] <= call["ts"] < event["ts"] + event["dur"]
        ]
        return min(outer, key=lambda event: event["dur"])["name"] if outer else "no operator"

    def during(self, gap: Gap, most: int = 3) -> list[tuple[str, float]]:
        """(name, microseconds) of the operators and calls that filled most of a gap, nested ones too."""
        overlaps: dict[str, float] = defaultdict(float)
        for event in (*self._operators, *self.calls):
            shared = min(gap.stop, event["ts"] + event["dur"]) - max(gap.start, event["ts"])
            if shared > 0:
                overlaps[event["name"]] += shared
        return sorted(overlaps.items(), key=lambda pair: -pair[1])[:most]


def _phases(marks: Sequence[Event]) -> list[tuple[float, float, str]]:
    """(start, stop, phase) of the marks and of what lies between them."""
    spans = [(mark["ts"], mark["ts"] + mark["dur"], mark["name"]) for mark in marks]
    between = [
        (first[1], second[0], BETWEEN[first[2], second[2]])
        for first, second in pairwise(spans)
        if (first[2], second[2]) in BETWEEN
    ]
    return spans + between


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
