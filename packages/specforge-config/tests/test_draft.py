from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.draft import (
    DFlashConfig,
    DSparkConfig,
    check_layer_ids,
    check_mask_token,
    default_layer_ids,
)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"num_heads": 8, "num_kv_heads": 3}, "num_kv_heads is 3, num_heads is 8"),
        ({"head_dim": 63}, "head_dim is 63; required: an even number"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling has ['factor']; required: rope_type among them"),
        ({"target_layer_ids": []}, "target_layer_ids is empty"),
        ({"target_layer_ids": [1, 2, 1]}, "target_layer_ids is [1, 2, 1]; required: each layer once"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids is [-1, 2]; required: 0 or more"),
        ({"sliding_window": 7}, "sliding_window is 7; required: more than block_size 7"),
        ({"confidence": {"enabled": False}, "loss": {"confidence": 0.5}}, "loss.confidence is set, but"),
        ({"confidence": {"enabled": False, "with_markov": False}}, "confidence.with_markov is set, but"),
        ({"loss": {"ce": 0, "l1": 0}}, "loss.ce and loss.l1 are both 0"),
    ],
)
def test_fields_that_disagree_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DSparkConfig.model_validate(fields)
    assert fault in str(caught.value)


def test_dflash_shares_the_checks_of_blocks() -> None:
    with pytest.raises(ValidationError, match="sliding_window is 4"):
        DFlashConfig(method="dflash", block_size=16, sliding_window=4)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64},
        {"target_layer_ids": [5, 1, 3]},
        {"sliding_window": 8},
        {"confidence": {"enabled": False}},
        {"confidence": {"enabled": False}, "loss": {"confidence": 0}},
    ],
)
def test_fields_that_agree_are_taken(fields: dict[str, Any]) -> None:
    DSparkConfig.model_validate(fields)


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(36, (1, 9, 17, 25, 33)), (8, (1, 2, 3, 4, 5)), (4, (0, 1, 2)), (2, (0,)), (1, (0,))],
)
def test_default_layers_spread_over_the_depth(layers: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(layers) == ids
    check_layer_ids(ids, layers)


@pytest.mark.parametrize(
    ("ids", "fault"),
    [
        ((), r"draft\.target_layer_ids is empty; required: at least one layer"),
        ((1, 1), "required: each layer once"),
        ((-1,), "required: 0 or more"),
        ((0, 4), r"required: at most 3, as the target has 4 layers"),
    ],
)
def test_layers_that_the_target_lacks_are_refused(ids: tuple[int, ...], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_layer_ids(ids, 4)


def test_layers_may_stand_in_any_order() -> None:
    check_layer_ids((3, 0, 2), 4)


@pytest.mark.parametrize(
    ("mask", "pad", "fault"),
    [
        (None, 0, "draft.mask_token_id is unset and the tokenizer has no mask token"),
        (128, 0, "draft.mask_token_id is 128; required: below 128, the rows of the target's embedding"),
        (-1, 0, "draft.mask_token_id is -1"),
        (3, 0, "draft.mask_token_id is 3, an end-of-sequence token"),
        (0, 0, "draft.mask_token_id is 0, the padding token"),
    ],
)
def test_unusable_mask_tokens_are_refused(mask: int | None, pad: int | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_mask_token(mask, 128, [2, 3], pad)


@pytest.mark.parametrize(("mask", "pad"), [(127, None), (5, 2), (100, 0)])
def test_free_mask_tokens_are_taken(mask: int, pad: int | None) -> None:
    check_mask_token(mask, 128, [2, 3], pad)
