import time

import pytest
import torch

from specforge_train.timing import Clock, peak_memory, performance


def test_clock_separates_capture_training_and_the_rest() -> None:
    clock = Clock(torch.device("cpu"))
    time.sleep(0.05)
    clock.restart()
    with clock.span("capture"):
        time.sleep(0.02)
    for _ in range(2):
        with clock.span("train"):
            time.sleep(0.02)
    time.sleep(0.02)
    laps = clock.lap(), clock.lap()
    first, second = (lap.read() for lap in laps)
    assert first.capture >= 0.02
    assert first.train >= 0.04
    assert first.wall >= first.capture + first.train + 0.02
    assert second.capture == second.train == 0.0
    assert second.wall < first.wall
    assert laps[1].start == laps[0].end


def test_performance_is_of_the_whole_world() -> None:
    ranks = [
        {
            "wall": 2.0,
            "capture": 0.5,
            "train": 1.0,
            "capture_seconds": 0.5,
            "captured_tokens": 300.0,
            "staged_bytes": 7.0,
        },
        {
            "wall": 2.0,
            "capture": 0.3,
            "train": 1.4,
            "capture_seconds": 0.3,
            "captured_tokens": 100.0,
            "staged_bytes": 9.0,
        },
    ]
    row = performance(ranks, 4, {"samples": 16, "tokens": 400, "flops": 8e12}, peak=4e12)
    assert row["perf/step_seconds"] == pytest.approx(0.5)
    assert row["perf/samples_per_s"] == pytest.approx(8.0)
    assert row["perf/tokens_per_s"] == pytest.approx(200.0)
    assert row["perf/capture_share"] == pytest.approx(0.2)
    assert row["perf/train_share"] == pytest.approx(0.6)
    assert row["perf/bubble_fraction"] == pytest.approx(0.2)
    assert row["perf/captured_tokens_per_s"] == pytest.approx(1000.0)
    assert row["perf/staged_bytes"] == 9.0
    assert row["perf/mfu"] == pytest.approx(0.5)
    assert row["perf/capture_share_by_rank"] == pytest.approx([0.25, 0.15])
    assert "perf/mfu" not in performance(ranks, 4, {"samples": 16, "tokens": 400, "flops": 0.0}, peak=4e12)


def test_peak_memory_of_a_cpu_is_the_resident_set() -> None:
    assert peak_memory(torch.device("cpu"))["peak_resident"] > 50e6
