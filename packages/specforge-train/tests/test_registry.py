import pytest

from specforge_config.draft import DSparkConfig
from specforge_config.target import TargetShape
from specforge_train.registry import get_method, method_of_config

TARGET = TargetShape(32, 64, 36, 4, 2, 8, 50, 256, 1e-6, 1e4, "float32", False)


def test_methods_are_found_by_name_and_configuration() -> None:
    for config in (
        {"architectures": ["Other", "DSparkDraftModel"]},
        {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"},
    ):
        assert get_method("dspark") is method_of_config(config)


@pytest.mark.parametrize("name", ["dflash", "eagle3"])
def test_methods_not_built_yet_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"not implemented yet: draft.method '{name}'"):
        get_method(name)


def test_unknown_architectures_are_refused() -> None:
    for config in (
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["DSparkDraftModel"], "speculators_model_type": "mtp"},
        {},
    ):
        with pytest.raises(ValueError, match="required DSparkDraftModel"):
            method_of_config(config)


def test_sizes_left_out_are_the_targets() -> None:
    shape = get_method("dspark").resolve(DSparkConfig(intermediate_size=48), TARGET, 49)
    assert shape.layer_ids == (1, 9, 17, 25, 33)
    assert (shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (48, 4, 2, 8)


@pytest.mark.parametrize(
    ("draft", "mask", "message"),
    [
        ({"target_layer_ids": (1, 36)}, 49, r"draft\.target_layer_ids is \[1, 36\]; required: at most 35"),
        ({}, 50, r"draft\.mask_token_id is 50; required: below 50"),
        ({"num_heads": 3}, 49, r"draft\.num_kv_heads is 2, required a divisor of draft\.num_heads, 3"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            49,
            "not implemented yet: draft.rope_scaling",
        ),
    ],
)
def test_what_does_not_fit_is_named(draft: dict, mask: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_method("dspark").resolve(DSparkConfig.model_validate(draft), TARGET, mask)
