"""Whole training steps side by side: ours, which other packages declare, and the peers', from their wheels.

A package declares its steps as entry points of the group `specforge_kernels.steps`, each a
`Build`: `(shapes, device) -> Contender`. specforge-train declares `dspark` (weights, gradients and moments in
bf16 as the peers keep them) and `trainer` (float32 master weights, a rank of a real run).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import torch

from .peers import find_peer
from .steps import Build, Report, StepShapes, measure_steps, print_reports

GROUP = "specforge_kernels.steps"

TINY = StepShapes(
    hidden=64, intermediate=128, vocabulary=500, heads=4, key_heads=2, head_dim=16, anchors=16,
    mask_token=499, markov_rank=8, draft_layers=2,
)  # fmt: skip
"""Sizes for trying the comparison out without a GPU."""


def find_steps(module: str | None = None) -> dict[str, Build]:
    """Name -> builder of every declared step, or of `STEPS` of a module where nothing is installed.

    Raises:
        ValueError: if there is none.
    """
    if module is not None:
        return dict(import_module(module).STEPS)
    found = {entry.name: entry.load() for entry in entry_points(group=GROUP)}
    if not found:
        raise ValueError(
            f"no package declares steps (entry points {GROUP}): install specforge-train, or name a module "
            "with --steps specforge_train.bench"
        )
    return found


def compare(
    steps: dict[str, Build],
    peers: Sequence[str],
    wheels: Path | None,
    *,
    lengths: Mapping[int, Sequence[int]],
    shapes: StepShapes,
    device: torch.device,
    at: Sequence[int],
) -> list[list[Report]]:
    """Measure all contenders on the lengths of each seed, and print their tables after each contender.

    Args:
        steps: ours; the first one is what the others' ratios are to.
        peers: names that `find_peer` knows.
        wheels: folder of the peers' wheels, unpacked.
        lengths: seed -> sequence lengths drawn from it.
        shapes: sizes of target and draft.
        device: where steps run.
        at: lengths that are also timed alone.

    Raises:
        ValueError: for peers without `wheels`, or unknown ones.
    """
    if peers and wheels is None:
        raise ValueError("--against needs --wheels, the folder of the peers' unpacked wheels")
    builds = dict(steps)
    for name in peers:
        assert wheels is not None
        builds[name] = find_peer(name, wheels)
    tables: list[list[Report]] = [[] for _ in lengths]
    for name, build in builds.items():
        reports = measure_steps(name, build, shapes, list(lengths.values()), at, device)
        for table, report in zip(tables, reports, strict=True):
            table.append(report)
        for seed, table in zip(lengths, tables, strict=True):
            print(f"lengths of seed {seed}")
            print_reports(table)
            print(flush=True)
    return tables


def as_json(tables: Sequence[Sequence[Report]], seeds: Sequence[int]) -> list[dict[str, object]]:
    """Every report as plain values, with its seed."""
    return [
        {"seed": seed, **dataclasses.asdict(report)}
        for seed, table in zip(seeds, tables, strict=True)
        for report in table
    ]
