import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tiny_training import SPEC, TinyStats, tiny_config

from specforge_train.checkpoint import Checkpoints
from specforge_train.decode import DecodeCounts
from specforge_train.metrics import HOST_SUMS
from specforge_train.parallel import World
from specforge_train.recorder import Recorder
from specforge_train.timing import Times


def test_rows_events_and_totals_of_a_window(tmp_path: Path, world: World) -> None:
    events: list[dict[str, Any]] = []
    config = tiny_config(tmp_path, engine={"tp_size": 2}, target={"backend": "sglang"}, world_size=2)
    recorder = Recorder(config, world, Checkpoints(tmp_path, world, {}, SPEC), events.append)
    for step, loss in ((1, 6.0), (2, 2.0)):
        head = dict.fromkeys(HOST_SUMS, 0.0) | {"weights": 2.0, "samples": 4.0, "dropped": 1.0}
        facts = {"step": step, "epoch": 0, "first": 4 * step, "count": 4, "lr": 0.1, "grad_norm": 1.0}
        recorder.add_step(facts, head, {"loss": (loss, 2.0), "accuracy": (1.0, 4.0)}, total_steps=9)
    recorder.close_window(recorder.measure(TinyStats(capture_seconds=2.0, tokens=400, staged_bytes=7)))
    recorder.add_evaluation(2, DecodeCounts.zeros(2))
    recorder.close()
    row, evaluation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {key: row[key] for key in ("step", "first", "loss", "accuracy", "dropped", "skipped")} == {
        "step": 2,
        "first": 8,
        "loss": 2.0,
        "accuracy": 0.25,
        "dropped": 2,
        "skipped": 0,
    }
    # Both ranks of an island of two count its 400 tokens.
    assert row["perf/captured_tokens_per_s"] == pytest.approx(100.0)
    assert evaluation == {"step": 2, "eval/lossless_identical": 0, "eval/lossless_total": 0}
    assert events == [
        {"stage": "train", "step": 1, "total": 9, "loss": 3.0},
        {"stage": "train", "step": 2, "total": 9, "loss": 1.0},
        {"stage": "evaluate", "step": 2, "tau": None},
    ]
    assert (recorder.spent["samples"], recorder.spent["dropped"]) == (8.0, 2.0)


def test_the_window_that_compiles_counts_only_while_there_is_no_other(tmp_path: Path, world: World) -> None:
    recorder = Recorder(tiny_config(tmp_path), world, Checkpoints(tmp_path, world, {}, SPEC), None)
    spent = []
    for step, seconds in enumerate((50.0, 0.5, 0.25), 1):
        recorder.add_step({"step": step}, dict.fromkeys(HOST_SUMS, 0.0) | {"samples": 4.0}, {}, total_steps=9)
        measured = recorder.measure(TinyStats(0.0, 0, 0))
        lap = SimpleNamespace(read=lambda wall=seconds: Times(wall=wall, capture=wall / 2, train=wall / 4))
        recorder.close_window(replace(measured, lap=cast(Any, lap)))
        spent.append({name: recorder.spent[name] for name in ("wall", "capture", "timed", "samples")})
    recorder.close()
    assert spent == [
        {"wall": 50.0, "capture": 25.0, "timed": 4.0, "samples": 4.0},
        {"wall": 0.5, "capture": 0.25, "timed": 4.0, "samples": 8.0},
        {"wall": 0.75, "capture": 0.375, "timed": 8.0, "samples": 12.0},
    ]


def test_only_rank_0_writes_metrics_and_reports(tmp_path: Path, world: World) -> None:
    events: list[dict[str, Any]] = []
    config = tiny_config(tmp_path, tracking={"samples": True})
    second = replace(world, rank=1)
    recorder = Recorder(config, second, Checkpoints(tmp_path, world, {}, SPEC), events.append)
    recorder.tell("train", 1)
    recorder.add_samples(3, [((0, 5), "a"), ((1, 0), "b")])
    recorder.sync()
    recorder.close()
    assert events == []
    assert [path.name for path in tmp_path.iterdir()] == ["samples.rank1.jsonl"]
    written = json.loads((tmp_path / "samples.rank1.jsonl").read_text())
    assert written == {"step": 3, "samples": [[0, 5, "a"], [1, 0, "b"]]}
