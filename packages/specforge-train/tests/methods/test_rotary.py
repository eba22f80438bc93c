from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from specforge_kernels.draft_layer.api import rotate
from specforge_train.methods.rotary import check_scaling, turns

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [None, YARN, YARN | {"beta_fast": 16, "beta_slow": 2}, YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}],
)
def test_equals_transformers(scaling: dict[str, Any] | None) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4} | (scaling or {})
    config = Qwen3Config(head_dim=16, rope_parameters=rope, max_position_embeddings=65536)
    positions = torch.tensor([0, 1, 17, 4095, 4096, 60000])
    x = torch.randn(6, 2, 16)
    theirs = Qwen3RotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *theirs)
    # Angles reach 6e4 in float32, whose rounding is then 4e-3; the two compute them in the same order.
    torch.testing.assert_close(rotate(x, turns(16, 1e4, scaling).at(positions)), expected[0].transpose(0, 1))


def test_rotates_in_float32_and_keeps_the_type() -> None:
    x = torch.randn(3, 2, 8)
    rotary = turns(8, 1e4, None).at(torch.tensor([5, 6, 7]))
    exact = rotate(x.bfloat16().float(), rotary)
    assert torch.equal(rotate(x.bfloat16(), rotary), exact.bfloat16())


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "not implemented yet: draft.rope_scaling of type 'longrope'",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, r"lacks \['original_max_position_embeddings'\]"),
        (YARN | {"attention_factor": 1.0}, r"does not know \['attention_factor'\]"),
    ],
)
def test_refuses_what_is_not_known(scaling: dict[str, float | str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scaling(scaling)


def test_default_scaling_is_plain_rotation() -> None:
    check_scaling({"rope_type": "default"})
    positions = torch.arange(4)
    plain, default = (turns(8, 1e4, x).at(positions) for x in (None, {"rope_type": "default"}))
    assert torch.equal(plain.cos, default.cos)
