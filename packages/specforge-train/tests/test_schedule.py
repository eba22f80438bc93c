import math
from typing import Any

import pytest

from specforge_config.optim import ScheduleConfig
from specforge_train.schedule import lr_factor, warmup_steps


def factors(total: int, **settings: Any) -> list[float]:
    return [lr_factor(ScheduleConfig(**settings), step, total) for step in range(1, total + 1)]


def test_warmup_rises_to_the_peak_without_a_lost_first_step() -> None:
    assert factors(6, kind="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warmup_ratio_counts_of_all_steps() -> None:
    assert warmup_steps(ScheduleConfig(warmup_ratio=0.1), 25) == 3
    assert warmup_steps(ScheduleConfig(), 25) == 0


def test_cosine_and_linear_fall_from_the_peak_to_the_floor_after_the_last_step() -> None:
    linear = factors(9, kind="linear", warmup_steps=4, min_ratio=0.1)
    assert linear[3:] == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25])
    cosine = factors(5, kind="cosine", warmup_steps=1)
    assert cosine == pytest.approx([1.0, *((1 + math.cos(math.pi * k / 5)) / 2 for k in range(1, 5))])
    assert cosine[-1] > 0


def test_wsd_is_stable_until_its_last_share() -> None:
    found = factors(10, kind="wsd", warmup_steps=2, decay_ratio=0.3)
    assert found == pytest.approx([0.5, *[1.0] * 6, 0.75, 0.5, 0.25])


@pytest.mark.parametrize("kind", ["constant", "cosine", "linear", "wsd"])
@pytest.mark.parametrize("total", [1, 3])
def test_short_runs_and_long_warmups_stay_in_range(kind: str, total: int) -> None:
    for warmup in (0, 1, 7):
        assert all(0 < factor <= 1 for factor in factors(total, kind=kind, warmup_steps=warmup))
