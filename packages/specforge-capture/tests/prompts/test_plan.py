import time
from itertools import islice
from typing import Any

import numpy as np
import pytest

from specforge_capture.prompts.plan import PromptPlan
from specforge_config.run import RunConfig


def plan(**changes: Any) -> PromptPlan:
    fields: dict[str, Any] = {
        "num_rows": 50,
        "fingerprint": "f",
        "seed": 1,
        "prompt_seed": 2,
        "epochs": 2,
        "islands": 1,
        "tp_size": 1,
        "batch_size": 4,
    }
    return PromptPlan(**{**fields, **changes})


def windows(plan: PromptPlan) -> list[set[tuple[int, int, int]]]:
    """The samples of each optimizer step over all islands."""
    islands = [list(plan.island_batches(island)) for island in range(plan.islands)]
    return [
        {
            (task.epoch, task.position, task.row)
            for batches in islands
            for batch in batches[step * plan.accumulation : (step + 1) * plan.accumulation]
            for task in batch
        }
        for step in range(plan.total_steps)
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {"islands": 2, "batch_size": 2},
        {"islands": 4, "batch_size": 1},
        {"batch_size": 1, "accumulation": 4},
        {"islands": 2, "batch_size": 1, "accumulation": 2},
        {"islands": 1, "tp_size": 2, "batch_size": 2},
        {"islands": 2, "tp_size": 2, "batch_size": 1},
    ],
)
def test_a_step_sees_the_same_samples_in_every_layout(layout: dict[str, int]) -> None:
    assert windows(plan(**layout)) == windows(plan())


def test_an_epoch_takes_each_row_at_most_once_and_reports_its_tail() -> None:
    steps = windows(plan())
    assert len(steps) == plan().total_steps == 2 * 12
    for epoch in range(2):
        taken = [task for step in steps[epoch * 12 : (epoch + 1) * 12] for task in step]
        assert {task[0] for task in taken} == {epoch}
        assert sorted(task[1] for task in taken) == list(range(48))
        assert len({task[2] for task in taken}) == 48
    assert plan().tail == 2


def test_positions_of_a_step_are_consecutive_and_islands_are_strided() -> None:
    strided = plan(islands=2, batch_size=2, accumulation=2)
    first, second = (next(islice(strided.island_batches(i), 1, None)) for i in range(2))
    assert [task.position for task in first] == [4, 5]
    assert [task.position for task in second] == [6, 7]


def test_epochs_have_their_own_order_and_seeds_too() -> None:
    orders = [plan().permutation(0), plan().permutation(1), plan(prompt_seed=3).permutation(0)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert np.array_equal(plan(seed=9).permutation(0), orders[0])


def test_the_order_is_fixed_for_good() -> None:
    # A run resumed under another numpy must go on in the same order.
    assert plan(num_rows=8).permutation(0).tolist() == [7, 3, 6, 0, 1, 4, 5, 2]


LENGTHS = np.random.default_rng(0).integers(40, 4000, 50)
GROUPED = {"group_by_length": 4, "lengths": LENGTHS}


def test_steps_grouped_by_length_take_the_same_rows_in_shuffled_steps() -> None:
    grouped, random = plan(**GROUPED), plan()
    for epoch in range(2):
        found, expected = grouped.permutation(epoch), random.permutation(epoch)
        for first in range(0, 48, 16):  # groups of four steps of four
            assert sorted(found[first : first + 16]) == sorted(expected[first : first + 16])
        assert found[48:].tolist() == expected[48:].tolist()
        steps = LENGTHS[found[:48]].reshape(-1, 4)
        assert (np.diff(steps) >= 0).all()
        for group in steps.reshape(3, 4, 4):
            ordered = group[np.argsort(group[:, 0])]
            assert (ordered[1:, 0] >= ordered[:-1, -1]).all()
        assert (np.diff(steps[:, 0]) < 0).any()
        spread = LENGTHS[expected[:48]].reshape(-1, 4)
        assert np.ptp(steps, axis=1).mean() < 0.5 * np.ptp(spread, axis=1).mean()
    assert grouped.permutation(0).tolist() != grouped.permutation(1).tolist()


def test_a_grouped_step_sees_the_same_samples_in_every_layout() -> None:
    assert windows(plan(islands=2, batch_size=1, accumulation=2, **GROUPED)) == windows(plan(**GROUPED))


def test_a_short_last_group_and_missing_lengths() -> None:
    odd = plan(group_by_length=5, lengths=LENGTHS)
    assert sorted(odd.permutation(0)) == list(range(50))
    with pytest.raises(ValueError, match="needs the lengths"):
        plan(group_by_length=5)


@pytest.mark.parametrize("start", [0, 1, 11, 12, 13, 23, 24])
def test_a_start_inside_the_plan_equals_skipping(start: int) -> None:
    layout = plan(batch_size=2, accumulation=2)
    assert list(layout.island_batches(0, start)) == list(layout.island_batches(0))[2 * start :]


def test_a_late_start_expands_no_earlier_epoch() -> None:
    large = plan(num_rows=2000, epochs=10**7)
    begin = time.monotonic()
    (task, *_) = next(large.island_batches(0, large.total_steps - 1))
    assert time.monotonic() - begin < 1
    assert task.epoch == 10**7 - 1


def test_too_few_prompts_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"7 usable prompts fill no optimizer step of 8 samples"):
        plan(num_rows=7, accumulation=2)


def test_there_is_no_such_island() -> None:
    with pytest.raises(ValueError, match="island 1 of a plan with 1 islands"):
        next(plan().island_batches(1))


def test_the_plan_of_a_run() -> None:
    config = RunConfig.model_validate(
        {
            "seed": 7,
            "target": {"path": "t"},
            "data": {"train": "d.jsonl"},
            "training": {"epochs": 3, "batch_size": 2, "global_batch_size": 8},
            "deployment": {"trainer": {"nproc_per_node": 2}},
        }
    )
    assert PromptPlan.of_run(config, 100, "f").record() == {
        "group_by_length": 0,
        "seed": 7,
        "prompt_seed": 7,
        "epochs": 3,
        "islands": 2,
        "tp_size": 1,
        "batch_size": 2,
        "accumulation": 2,
        "rows": 100,
        "fingerprint": "f",
    }


def test_ranks_share_a_window_as_their_islands_do() -> None:
    made = plan(islands=2, tp_size=2, batch_size=3, accumulation=2)
    for step in range(made.total_steps):
        window = made.window(step)
        for island in range(2):
            batches = list(islice(made.island_batches(island, step), 2))
            for place in range(2):
                own = made.micro_batches(window, 2 * island + place)
                assert own == [batch[3 * place : 3 * place + 3] for batch in batches]
