import numpy as np
import pytest

from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.watermarks import Held, largest_window
from specforge_config.producer import Watermarks


def fill(held: Held, step: int, window: int, nbytes: int = 1) -> int:
    """Ask for a step's samples as far as they are admitted; how many were."""
    for done in range(window):
        if not held.admits(step, nbytes):
            return done
        held.add(step, nbytes)
    return window


def test_a_pause_lasts_from_the_high_to_the_low_mark() -> None:
    held = Held(Watermarks(high_samples=10, low_samples=4, high_bytes=None, low_bytes=None), 0)
    assert [fill(held, step, 4) for step in (1, 2, 3)] == [4, 4, 2]
    held.release(1)
    assert held.samples == 6
    assert not held.admits(4, 1)
    held.release(2)
    assert held.samples == 2
    assert held.admits(4, 1)


def test_the_next_window_never_waits_for_the_low_mark() -> None:
    held = Held(Watermarks(high_samples=6, low_samples=4, high_bytes=None, low_bytes=None), 0)
    assert [fill(held, 1, 4), fill(held, 2, 4)] == [4, 2]
    held.add(2, 1)  # as of an earlier producer
    held.release(1)
    assert fill(held, 2, 1) == 1


def test_bytes_pause_too() -> None:
    held = Held(Watermarks(high_samples=100, low_samples=100, high_bytes=800, low_bytes=650), 0)
    assert [fill(held, 1, 4, 168), fill(held, 2, 4, 60)] == [4, 2]
    held.release(1)
    assert held.bytes == 120
    assert fill(held, 2, 2, 60) == 2


@pytest.mark.parametrize("high", [4, 5, 7, 8, 9, 12])
@pytest.mark.parametrize("low", [4, 6, 8])
def test_no_marks_starve_the_trainer(high: int, low: int) -> None:
    """The trainer takes a window only once it is whole; every window must come."""
    held = Held(Watermarks(max(high, low), low, max(high, low) * 10, 10), 0)
    asked = dict.fromkeys(range(1, 9), 0)
    for trained in range(1, 9):
        for step in asked:
            if asked[step] < 4 and all(asked[s] == 4 for s in range(1, step)):
                asked[step] += fill(held, step, 4 - asked[step], 10)
        assert asked[trained] == 4
        assert held.samples <= max(high, low)
        held.release(trained)


def test_the_largest_window_is_found_in_any_epoch() -> None:
    plan = PromptPlan(
        num_rows=7,
        fingerprint="",
        seed=0,
        prompt_seed=0,
        epochs=3,
        islands=1,
        tp_size=1,
        batch_size=2,
    )
    lengths = np.array([1, 2, 4, 8, 16, 32, 64])
    sums = [int(lengths[[task.row for task in plan.window(step)]].sum()) for step in range(plan.total_steps)]
    assert largest_window(plan, lengths) == max(sums)
