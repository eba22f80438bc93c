import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_drafts import make_shape
from transformers import AutoConfig, Qwen3Config, Qwen3Model

from specforge_train.export.folder import check_export, load_exported
from specforge_train.export.sglang import export_sglang
from specforge_train.methods.dspark import DSpark

METHOD = DSpark()
LAYER = [
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
]
BACKBONE = ["fc.weight", "hidden_norm.weight", "norm.weight"] + [
    f"layers.{i}.{name}.weight" for i in (0, 1) for name in LAYER
]
MARKOV = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
CONFIDENCE = ["confidence_head.proj.weight", "confidence_head.proj.bias"]
VARIANTS = [
    ({}, [*MARKOV, *CONFIDENCE]),
    (
        {"markov": {"head": "gated"}},
        [*MARKOV, *CONFIDENCE, "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"],
    ),
    (
        {"markov": {"head": "rnn"}},
        [*MARKOV, *CONFIDENCE, "markov_head.joint_proj.weight", "markov_head.joint_proj.bias"],
    ),
    ({"confidence": {"enabled": False}}, MARKOV),
]


def built(shape):
    model = METHOD.build(shape)
    model.init_weights(0)
    return model


@pytest.mark.parametrize(("draft", "heads"), VARIANTS, ids=["vanilla", "gated", "rnn", "no confidence"])
def test_an_export_holds_exactly_the_served_names(draft, heads, tmp_path: Path) -> None:
    model = built(make_shape(**draft))
    folder = export_sglang(model.state_dict(), model.shape, tmp_path / "export", torch.float32)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    written = load_file(folder / "model.safetensors")
    assert sorted(written) == sorted(BACKBONE + heads)
    shape, state = load_exported(folder)
    again = METHOD.build(shape)
    again.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(written[name], value), name
        assert torch.equal(again.state_dict()[name], value), name


def test_the_configuration_is_explicit(tmp_path: Path) -> None:
    shape = make_shape(markov={"head": "gated", "rank": 6}, confidence={"with_markov": False})
    folder = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    heads = {
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    }
    dflash = {
        "target_layer_ids": [1, 4],
        "mask_token_id": 39,
        "block_size": 4,
        "projector_type": "dspark",
        "attention_mode": "gqa",
    }
    assert json.loads((folder / "config.json").read_text()) == heads | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 4,
        "dflash_config": heads | dflash,
        "dtype": "bfloat16",
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 16,
        "initializer_range": 0.3,
        "intermediate_size": 24,
        "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 128,
        "max_window_layers": 2,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 6,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e4,
        "sample_from_anchor": True,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 40,
    }
    assert all(value.dtype == torch.bfloat16 for value in load_exported(folder)[1].values())


def test_training_export_and_capture_agree_on_layers(tmp_path: Path) -> None:
    """A golden triple: the run's layer ids, the exported ones, and the states that a capture takes."""
    shape = make_shape(target_layer_ids=(0, 2, 5))
    folder = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    exported = AutoConfig.from_pretrained(folder).dflash_config["target_layer_ids"]
    assert shape.config.target_layer_ids == check_export(folder).layer_ids == tuple(exported) == (0, 2, 5)
    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    target, outputs = Qwen3Model(config).eval(), {}
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda _, __, out, index=index: outputs.__setitem__(index, out))
    with torch.no_grad():
        states = target(torch.tensor([[1, 2, 3]]), output_hidden_states=True).hidden_states
    # The last entry of hidden_states has passed the final norm; a capture of the last layer has not.
    for k in exported[:-1]:
        assert torch.equal(states[k + 1], outputs[k])


@pytest.mark.parametrize(
    "draft",
    [
        {"sliding_window": 9},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"num_heads": 2, "num_kv_heads": 2, "rope_theta": 5e5, "max_positions": 512, "rms_norm_eps": 1e-5},
    ],
)
def test_sizes_survive_the_round_trip_and_transformers(draft, tmp_path: Path) -> None:
    shape = make_shape(**draft)
    folder = export_sglang(built(shape).state_dict(), shape, tmp_path / "export")
    read = check_export(folder)
    for name in vars(shape):
        if name != "config":
            assert getattr(read, name) == getattr(shape, name), name
    for name in ("block_size", "sliding_window", "rope_scaling", "markov", "confidence", "num_layers"):
        assert getattr(read.config, name) == getattr(shape.config, name), name
    theirs = AutoConfig.from_pretrained(folder)
    assert theirs.rope_parameters["rope_theta"] == shape.rope_theta
    assert theirs.rope_parameters["rope_type"] == ("yarn" if "rope_scaling" in draft else "default")
    assert theirs.sliding_window == draft.get("sliding_window")
    assert set(theirs.layer_types) == {"sliding_attention" if "sliding_window" in draft else "full_attention"}


def test_another_slot_convention_is_refused() -> None:
    config = METHOD.served_config(make_shape(), "bfloat16")
    with pytest.raises(ValueError, match="sample_from_anchor False, required True"):
        METHOD.served_shape(config | {"sample_from_anchor": False})
    for changed in ({"attention_bias": True}, {"hidden_act": "gelu"}, {"layer_types": ["full_attention"]}):
        with pytest.raises(ValueError, match=next(iter(changed))):
            METHOD.served_shape(config | changed)
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    with pytest.raises(ValueError, match="not implemented yet"):
        METHOD.served_shape(config | mixed)
