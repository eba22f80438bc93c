import dataclasses
from typing import Any

import pytest

from specforge_capture.sglang.engine_args import (
    CONTEXT_HEADROOM,
    resolve_answering_arguments,
    resolve_engine_arguments,
)
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape

SHAPE = TargetShape(64, 128, 4, 4, 2, 16, 512, 4096, 1e-6, 1e4, "bfloat16", False)


def run_config(**sections: Any) -> RunConfig:
    sections = {
        "target": {"path": "/targets/tiny", "backend": "sglang"},
        "data": {"train": ["rows.jsonl"], "max_length": 1000},
        **sections,
    }
    return RunConfig.model_validate(sections)


def test_pool_and_requests_hold_one_island_batch() -> None:
    config = run_config(
        engine={"tp_size": 2},
        training={"batch_size": 3},
        deployment={"trainer": {"nproc_per_node": 4}},
    )
    values = resolve_engine_arguments(config, SHAPE, "cuda").keywords()
    assert values["tp_size"] == 2
    assert values["max_running_requests"] == 6
    # Rows of up to 1007 slots, each on whole pages of 128.
    assert values["max_total_tokens"] == 6 * 1024
    assert values["context_length"] == 1007
    assert values["dtype"] == "bfloat16"
    assert values["disable_custom_all_reduce"] is True
    assert "attention_backend" not in values, "on a GPU the engine chooses"
    assert "mem_fraction_static" not in values


def test_cpu_names_what_sglang_cannot_guess() -> None:
    values = resolve_engine_arguments(run_config(), SHAPE, "cpu").keywords()
    assert (values["attention_backend"], values["mem_fraction_static"]) == ("torch_native", 0.5)
    assert "disable_custom_all_reduce" not in values


def test_evaluated_answers_fit_behind_a_prompt_of_full_length() -> None:
    evaluation = {"prompts": ["held_out.jsonl"], "max_new_tokens": 100}
    draft = {"method": "dspark", "block_size": 7}
    values = resolve_engine_arguments(
        run_config(evaluation=evaluation, draft=draft), SHAPE, "cuda"
    ).keywords()
    assert values["context_length"] == 1007 + 100 + 8
    short = dataclasses.replace(SHAPE, max_positions=1010)
    values = resolve_engine_arguments(
        run_config(evaluation=evaluation, draft=draft), short, "cuda"
    ).keywords()
    assert values["context_length"] == 1010, "as far as positions reach"


def test_command_line_is_a_view_of_the_keywords() -> None:
    config = run_config(engine={"extra": {"enable_p2p_check": False, "quantization": "fp8"}})
    arguments = resolve_engine_arguments(config, SHAPE, "cuda")
    line = arguments.command_line()
    assert line[:2] == ["--model-path", "/targets/tiny"]
    assert line[line.index("--chunked-prefill-size") + 1] == "-1"
    assert line[line.index("--quantization") + 1] == "fp8"
    assert "--disable-radix-cache" in line
    assert "--enable-p2p-check" not in line
    assert arguments.keywords()["enable_p2p_check"] is False


@pytest.mark.parametrize(
    ("sections", "found", "required"),
    [
        ({"engine": {"context_length": 1006}}, "engine.context_length is 1006", "1007"),
        ({"data": {"train": ["r.jsonl"], "max_length": 4090}}, "data.max_length is 4090", "4089"),
        (
            {"training": {"batch_size": 2}, "engine": {"max_running_requests": 1}},
            "requests is 1",
            "at least 2",
        ),
        (
            {"training": {"batch_size": 2}, "engine": {"max_total_tokens": 1999}},
            "tokens is 1999",
            "at least 2000",
        ),
        ({"engine": {"extra": {"enable_dp_attention": True}}}, "extra.enable_dp_attention", "drop it"),
        ({"engine": {"extra": {"disable_radix_cache": False}}}, "extra.disable_radix_cache", "drop it"),
    ],
)
def test_unservable_settings_are_errors(sections: dict[str, Any], found: str, required: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve_engine_arguments(run_config(**sections), SHAPE, "cuda")
    assert found in str(error.value)
    assert required in str(error.value)


def test_data_parallel_engine_is_refused() -> None:
    config = run_config(engine={"tp_size": 2, "dp_size": 2}, deployment={"trainer": {"nproc_per_node": 2}})
    with pytest.raises(ValueError, match=r"engine\.dp_size is 2; required: 1"):
        resolve_engine_arguments(config, SHAPE, "cuda")


def test_context_beyond_the_positions_is_the_users_to_ask_for() -> None:
    longest = 8000
    config = run_config(
        data={"train": ["r.jsonl"], "max_length": longest},
        engine={"context_length": longest + CONTEXT_HEADROOM},
    )
    assert resolve_engine_arguments(config, SHAPE, "cuda").keywords()["context_length"] == 8007


def test_a_server_holds_the_requests_in_flight_and_leaves_no_room_for_answers() -> None:
    deployment = {
        "mode": "disaggregated",
        "managed": True,
        "producer": {"in_flight": 3},
        "trainer": {"nproc_per_node": 2},
    }
    served = {"deployment": deployment, "evaluation": {"prompts": ["held_out.jsonl"]}}
    values = resolve_engine_arguments(run_config(engine={"tp_size": 8}, **served), SHAPE, "cuda").keywords()
    assert values["max_running_requests"] == 3
    assert values["max_total_tokens"] == 3 * 1024
    assert values["context_length"] == 1007
    assert "disable_custom_all_reduce" not in values, "no trainer shares the process"
    one = run_config(engine={"max_running_requests": 1, "max_total_tokens": 1007}, **served)
    values = resolve_engine_arguments(one, SHAPE, "cuda").keywords()
    assert (values["max_running_requests"], values["max_total_tokens"]) == (1, 1007)


def test_where_prompts_are_answered_sglang_keeps_its_own_ways() -> None:
    config = run_config(
        engine={"tp_size": 2, "extra": {"disable_radix_cache": True}},
        regeneration={"batch_size": 9},
        deployment={"trainer": {"nproc_per_node": 2}},
    )
    values = resolve_answering_arguments(config, SHAPE, "cuda").keywords()
    assert (values["tp_size"], values["max_running_requests"], values["context_length"]) == (2, 9, 1007)
    assert values["disable_radix_cache"] is True, "what capture needs may be chosen here"
    for name in (
        "chunked_prefill_size",
        "disable_cuda_graph",
        "max_total_tokens",
        "disable_custom_all_reduce",
    ):
        assert name not in values, "the engine chooses"
    values = resolve_answering_arguments(config, SHAPE, "cpu").keywords()
    assert values["max_total_tokens"] == 9 * 1024
    seeded = run_config(engine={"extra": {"random_seed": 2}})
    with pytest.raises(ValueError, match=r"extra\.random_seed is set; required: drop it, regeneration needs"):
        resolve_answering_arguments(seeded, SHAPE, "cuda")
