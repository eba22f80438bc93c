from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge_capture.prompts.cache import PromptSet, open_or_build
from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.stream import LocalRolloutStream
from specforge_capture.targets.base import ALL, PromptRow
from specforge_capture.targets.hf import HFTarget
from specforge_config.data import DataConfig
from specforge_config.features import FeatureBatch


@pytest.fixture
def prompts(
    write_rows: Callable[..., Path], data_config: Callable[..., DataConfig], renderer: ChatRenderer
) -> PromptSet:
    rows = [{"input_ids": list(range(4 + i, 8 + 3 * i)), "loss_mask": [1] * (4 + 2 * i)} for i in range(9)]
    return open_or_build(data_config(write_rows(*rows)), renderer, vocab_size=320)


def plan_over(prompts: PromptSet, **changes: Any) -> PromptPlan:
    fields: dict[str, Any] = {"islands": 1, "tp_size": 1, "batch_size": 2, "epochs": 2}
    fields |= {"seed": 0, "prompt_seed": 0}
    fields |= {"num_rows": len(prompts), "fingerprint": prompts.fingerprint, **changes}
    return PromptPlan(**fields)


def test_one_batch_a_micro_step_in_the_plans_order(target: HFTarget, prompts: PromptSet) -> None:
    plan = plan_over(prompts)
    batches = list(LocalRolloutStream(target, prompts, plan))
    assert len(batches) == 8
    for batch, tasks in zip(batches, plan.island_batches(0), strict=True):
        assert batch.positions == tuple((task.epoch, task.position) for task in tasks)
        expected = [prompts[task.row] for task in tasks]
        assert batch.sample_ids == tuple(row.sample_id for row in expected)
        assert batch.tokens.tolist() == [token for row in expected for token in row.input_ids.tolist()]


def test_a_stream_starts_at_any_step(target: HFTarget, prompts: PromptSet) -> None:
    plan = plan_over(prompts, accumulation=2)
    whole = [batch.positions for batch in LocalRolloutStream(target, prompts, plan)]
    assert [b.positions for b in LocalRolloutStream(target, prompts, plan, start_step=3)] == whole[6:]


def test_islands_share_an_epoch(target: HFTarget, prompts: PromptSet) -> None:
    plan = plan_over(prompts, islands=2, epochs=1)
    seen = [
        position
        for island in range(2)
        for batch in LocalRolloutStream(target, prompts, plan, island=island)
        for _, position in batch.positions
    ]
    assert sorted(seen) == list(range(8))


def test_ranks_of_an_island_keep_their_own_rows(target: HFTarget, prompts: PromptSet) -> None:
    wide = plan_over(prompts, tp_size=2, epochs=1)
    whole = next(LocalRolloutStream(target, prompts, plan_over(prompts, batch_size=4, epochs=1)))
    for rank in range(2):
        own = next(LocalRolloutStream(target, prompts, wide, rank=rank))
        assert own.sample_ids == whole.sample_ids[2 * rank : 2 * rank + 2]
        start, stop = whole.cu_seqlens[2 * rank], whole.cu_seqlens[2 * rank + 2]
        assert torch.equal(own.hidden, whole.hidden[start:stop])
        assert own.last_hidden is not None
        assert whole.last_hidden is not None
        assert torch.equal(own.last_hidden, whole.last_hidden[start:stop])
        assert own.cu_seqlens.tolist() == (whole.cu_seqlens[2 * rank : 2 * rank + 3] - start).tolist()
        # The rest of the island's allocation is not kept alive.
        assert own.hidden.untyped_storage().nbytes() == own.hidden.nbytes


def test_stats_cover_the_time_since_the_last_call(target: HFTarget, prompts: PromptSet) -> None:
    stream = LocalRolloutStream(target, prompts, plan_over(prompts))
    batches = [next(stream), next(stream)]
    stats = stream.stats()
    assert stats.capture_seconds > 0
    assert stats.tokens == sum(len(batch.tokens) for batch in batches)
    assert stats.staged_bytes == max(batch.state_bytes for batch in batches)
    assert (stream.stats().capture_seconds, stream.stats().tokens) == (0, 0)


Spoil = Callable[[HFTarget, Sequence[PromptRow]], FeatureBatch]


class Faulty:
    """Spoils what a real target captured."""

    def __init__(self, target: HFTarget, spoil: Spoil) -> None:
        self.spec = target.spec
        self._target, self._spoil = target, spoil

    def capture(self, rows: Sequence[PromptRow], own: slice = ALL) -> FeatureBatch:
        return self._spoil(self._target, rows[own])

    def close(self) -> None:
        self._target.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda target, rows: target.capture(rows[:-1]),
        lambda target, rows: target.capture(rows[::-1]),
        lambda target, rows: target.capture(
            [replace(rows[0], input_ids=rows[0].input_ids[:-1], loss_mask=rows[0].loss_mask[:-1]), *rows[1:]]
        ),
        lambda target, rows: target.capture([replace(row, position=(9, 9)) for row in rows]),
    ],
    ids=["a row short", "another order", "a token short", "other positions"],
)
def test_a_partial_capture_names_the_prompts(spoil: Spoil, target: HFTarget, prompts: PromptSet) -> None:
    plan = plan_over(prompts)
    stream = LocalRolloutStream(Faulty(target, spoil), prompts, plan)
    asked = [prompts[task.row].sample_id for task in next(plan.island_batches(0))]
    with pytest.raises(ValueError, match="partial capture: asked for") as error:
        next(stream)
    assert all(name in str(error.value) for name in asked)


def test_a_capture_under_another_contract_is_an_error(target: HFTarget, prompts: PromptSet) -> None:
    def other(target: HFTarget, rows: Sequence[PromptRow]) -> FeatureBatch:
        return replace(target.capture(rows), spec=target.spec.model_copy(update={"target_revision": "other"}))

    with pytest.raises(ValueError, match="target_revision: 'tiny'"):
        next(LocalRolloutStream(Faulty(target, other), prompts, plan_over(prompts)))


def test_a_plan_over_other_prompts_is_an_error(target: HFTarget, prompts: PromptSet) -> None:
    with pytest.raises(ValueError, match="other prompts"):
        LocalRolloutStream(target, prompts, replace(plan_over(prompts), fingerprint="other"))
