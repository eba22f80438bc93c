from collections.abc import Callable

import pytest
import torch

from specforge_config.draft import BlockDraft
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, read_target_shape
from specforge_launch.memory import MemoryPlan, draft_parameters, predict, require_room_to_measure
from specforge_train.registry import get_method

Load = Callable[..., RunConfig]


def predicted(config: RunConfig, capacity: int | None = None) -> MemoryPlan:
    return predict(config, read_target_shape(config.target.path), on_gpu=False, capacity=capacity)


def parameters_of(config: RunConfig) -> int:
    assert isinstance(config.draft, BlockDraft)
    return draft_parameters(config.draft, read_target_shape(config.target.path))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["draft.markov.head=gated"],
        ["draft.markov.head=rnn", "draft.markov.rank=12"],
        ["draft.confidence.enabled=false"],
        ["draft.confidence.with_markov=false", "draft.num_layers=3"],
        [
            "draft.num_heads=8",
            "draft.head_dim=32",
            "draft.intermediate_size=96",
            "draft.target_layer_ids=[1, 5]",
        ],
        ["draft.num_heads=8", "draft.num_kv_heads=4"],
    ],
)
def test_the_predicted_parameters_are_those_of_the_real_draft(load: Load, overrides: list[str]) -> None:
    config = load(*overrides)
    target, method = read_target_shape(config.target.path), get_method("dspark")
    with torch.device("meta"):
        model = method.build(method.resolve(config.draft, target, mask_token_id=5))
    assert parameters_of(config) == sum(p.numel() for p in model.parameters())


def test_one_rank_holds_sixteen_bytes_a_parameter(load: Load) -> None:
    config = load()
    parameters = parameters_of(config)
    parts = predicted(config).parts
    states = ("draft master weights", "draft gradients", "optimizer states", "draft working weights")
    assert sum(parts[name] for name in states) == 16 * parameters


@pytest.mark.parametrize(("sharding", "shards"), [("no_shard", 1), ("grad_op", 4), ("full", 4)])
def test_sharding_divides_the_states(load: Load, sharding: str, shards: int) -> None:
    config = load("deployment.trainer.nproc_per_node=4", f"training.sharding={sharding}")
    parameters = parameters_of(config)
    parts = predicted(config).parts
    assert parts["optimizer states"] == 8 * parameters // shards
    assert parts["draft master weights"] == parts["draft gradients"] == 4 * parameters // shards


def test_full_sharding_gathers_less_than_grad_op(load: Load) -> None:
    four = "deployment.trainer.nproc_per_node=4"
    whole, layers = (
        predicted(load(four, f"training.sharding={s}", "draft.num_layers=8")).parts["draft working weights"]
        for s in ("grad_op", "full")
    )
    assert 0 < layers < whole


def test_one_staged_batch_holds_the_captured_layers_and_the_final_state(load: Load) -> None:
    parts = predicted(load("draft.target_layer_ids=[0, 3, 6]", "target.dtype=float32")).parts
    samples, length, states, hidden = 4, 32, 3 + 1, 64
    assert parts["features of staged batches"] == samples * length * states * hidden * 4


def test_the_target_is_counted_in_its_own_type_and_shared_inside_an_island(load: Load) -> None:
    shape = TargetShape(64, 160, 8, 4, 2, 16, 320, 4096, 1e-6, 1e4, "bfloat16", True)
    parts = predicted(load()).parts
    assert parts["target weights"] == 2 * shape.parameters()


def test_the_total_is_the_sum_and_the_capacity_is_kept(load: Load) -> None:
    plan = predicted(load(), capacity=7)
    assert plan.total == sum(plan.parts.values()) > 0
    assert plan.to_json()["capacity"] == 7


def test_ranks_of_a_disaggregated_run_hold_fetched_batches_and_no_target(load: Load) -> None:
    managed = ["deployment.mode=disaggregated", "deployment.managed=true"]
    consumer, colocated = predicted(load(*managed)).parts, predicted(load()).parts
    assert not {"target weights", "target activations"} & consumer.keys()
    assert consumer["features of staged batches"] == 3 * colocated["features of staged batches"]
    ahead = predicted(load(*managed, "deployment.consumer.ahead_batches=1")).parts
    assert ahead["features of staged batches"] == 2 * colocated["features of staged batches"]


def test_a_target_that_does_not_fit_the_trainer_cannot_be_measured_there(load: Load) -> None:
    config = load("deployment.mode=disaggregated", "deployment.managed=true")
    target = read_target_shape(config.target.path)
    plenty = predicted(config, capacity=1 << 40)
    require_room_to_measure(config, target, plenty)
    require_room_to_measure(load("evaluation.prompts=[]"), target, predicted(config, capacity=1))
    with pytest.raises(ValueError, match=r"evaluation\.prompts is set.*specforge-launch evaluate"):
        require_room_to_measure(config, target, predicted(config, capacity=1000))


def test_a_peak_that_does_not_fit_names_the_settings_of_its_largest_parts() -> None:
    parts = {"target weights": 50, "draft activations": 20, "draft and teacher logits": 10}
    assert MemoryPlan(parts, None).fits is None
    assert MemoryPlan(parts, 80).fits is True
    weights = MemoryPlan(parts, 79)
    assert (weights.fits, weights.to_lower, weights.to_raise) == (False, (), ("engine.tp_size",))
    more = MemoryPlan(parts, 20)
    assert more.too_large == ("target weights", "draft activations")
    assert more.to_lower == ("data.max_length", "training.batch_size", "draft.num_anchors")


def test_every_part_that_grows_with_a_setting_names_one(load: Load) -> None:
    """Of all that a plan may count; the head alone is given by the target."""
    config = load("deployment.trainer.nproc_per_node=2", "target.backend=sglang", "engine.tp_size=2")
    parts = predict(config, read_target_shape(config.target.path), on_gpu=True, capacity=None).parts
    named = {name for name in parts if (alone := MemoryPlan({name: 2}, 1)).to_lower or alone.to_raise}
    assert parts.keys() - named == {"frozen embedding and head"}
