from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.run import RunConfig


def run(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"target": {"path": "t"}, "data": {"train": "a.jsonl"}} | sections)


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        (
            {"engine": {"tp_size": 2}, "deployment": {"trainer": {"nproc_per_node": 2}}},
            "target.backend hf holds a whole target on each rank; required: engine.tp_size 1",
        ),
        (
            {"engine": {"attention_backend": "fa3"}},
            "engine.attention_backend is set, but target.backend hf has no engine",
        ),
        ({"engine": {"extra": {"a": 1}}}, "engine.extra is set, but target.backend hf has no engine"),
        (
            {"target": {"path": "t", "backend": "sglang"}, "engine": {"context_length": 100}},
            "engine.context_length is 100; required: at least data.max_length, 4096",
        ),
        (
            {"target": {"path": "t", "backend": "sglang"}, "engine": {"max_total_tokens": 100}},
            "engine.max_total_tokens is 100; required: at least data.max_length, 4096",
        ),
        (
            {"draft": {"max_positions": 4095}},
            "draft.max_positions is 4095; required: at least data.max_length",
        ),
        (
            {"schedule": {"warmup_steps": 11}, "training": {"max_steps": 10}},
            "schedule.warmup_steps is 11; required: at most training.max_steps, 10",
        ),
        (
            {"schedule": {"kind": "wsd", "warmup_steps": 9}, "training": {"max_steps": 10}},
            "schedule.warmup_steps 9 and the decay over schedule.decay_ratio 0.2 exceed training.max_steps",
        ),
        (
            {"evaluation": {"prompts": ["b.jsonl", "./a.jsonl"]}},
            "evaluation.prompts holds a.jsonl, as does data.train; required: held-out prompts",
        ),
        (
            {"training": {"global_batch_size": 6}, "deployment": {"trainer": {"nproc_per_node": 4}}},
            "training.global_batch_size=6 cannot be shared by 4 ranks",
        ),
        (
            {"target": {"path": "t", "backend": "sglang"}, "engine": {"tp_size": 2}},
            "1 ranks cannot be cut into islands of engine.tp_size=2",
        ),
        (
            {"engine": {"tp_size": 2}, "deployment": {"mode": "disaggregated", "managed": True}},
            "target.backend hf holds a whole target on each capture server",
        ),
        (
            {
                "deployment": {"mode": "disaggregated", "managed": True},
                "evaluation": {"prompts": "b.jsonl", "interval": 10},
            },
            "evaluation.interval is 10, but the ranks of a disaggregated run hold no target while they train",
        ),
        (
            {
                "training": {"global_batch_size": 8},
                "deployment": {"mode": "disaggregated", "managed": True, "producer": {"low_samples": 7}},
            },
            "deployment.producer.low_samples is 7; required: at least one optimizer window, 8 samples",
        ),
        (
            {
                "deployment": {
                    "mode": "disaggregated",
                    "managed": True,
                    "servers": {"count": 2},
                    "store": {"capacity_bytes": 100},
                    "producer": {"high_bytes": 201},
                }
            },
            "deployment.producer.high_bytes is 201; required: at most 200",
        ),
        ({"name": "../up"}, "String should match pattern"),
        ({"seed": -1}, "greater than or equal to 0"),
    ],
)
def test_sections_that_disagree_are_refused(sections: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        run(**sections)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    "sections",
    [
        {"schedule": {"warmup_steps": 10}, "training": {"max_steps": 10}},
        {"schedule": {"kind": "wsd", "warmup_steps": 8}, "training": {"max_steps": 10}},
        {"draft": {"max_positions": 4096}},
        {"evaluation": {"prompts": "b.jsonl"}},
        {"engine": {"tp_size": 1, "load_format": "dummy"}},
        {
            "target": {"path": "t", "backend": "sglang"},
            "engine": {"tp_size": 2, "context_length": 4096},
            "deployment": {"trainer": {"nproc_per_node": 4}},
        },
        {
            "target": {"path": "t", "backend": "sglang"},
            "deployment": {"mode": "disaggregated", "managed": True},
            "engine": {"attention_backend": "fa3", "tp_size": 8},
        },
        {"deployment": {"mode": "disaggregated", "managed": True}, "evaluation": {"prompts": "b.jsonl"}},
    ],
)
def test_sections_that_agree_are_taken(sections: dict[str, Any]) -> None:
    run(**sections)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        run(engine={"max_total_tokens": 1}, draft={"max_positions": 1}, evaluation={"prompts": "a.jsonl"})
    assert all(
        key in str(caught.value)
        for key in ("engine.max_total_tokens", "draft.max_positions", "evaluation.prompts")
    )


def test_held_out_prompts_are_compared_as_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(ValidationError, match="required: held-out prompts"):
        run(
            data={"train": str(tmp_path / "a.jsonl")},
            evaluation={"prompts": str(tmp_path / "link.jsonl")},
        )


def test_seeds_and_folder() -> None:
    assert run(seed=3).prompt_seed == 3
    assert run(seed=3, data={"train": "a", "prompt_seed": 0}).prompt_seed == 0
    assert run(name="x").folder == "outputs/x"
    assert run(name="x", output_dir="y").folder == "y"


def test_unions_default_to_their_first_member() -> None:
    config = run(draft={"block_size": 4}, deployment={"trainer": {"nproc_per_node": 2}})
    assert (config.draft.method, config.deployment.mode) == ("dspark", "local_colocated")
    assert config.topology.world_size == 2


def test_only_ranks_with_a_target_form_islands() -> None:
    sglang = {"path": "t", "backend": "sglang"}
    trainer = {"nproc_per_node": 8}
    colocated = run(target=sglang, engine={"tp_size": 4}, deployment={"trainer": trainer})
    assert colocated.topology.num_islands == 2
    deployment = {"mode": "disaggregated", "managed": True, "trainer": trainer}
    consumers = run(target=sglang, engine={"tp_size": 16}, deployment=deployment)
    assert consumers.topology.num_islands == 8


def test_configurations_are_frozen() -> None:
    training: Any = run().training
    with pytest.raises(ValidationError, match="frozen"):
        training.epochs = 3
