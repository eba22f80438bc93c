import json
from pathlib import Path

import pytest
from tiny_drafts import make_shape
from transformers import AutoConfig

from specforge_train.export.folder import load_exported
from specforge_train.export.speculators import export_speculators
from specforge_train.methods.base import Verifier
from specforge_train.methods.dspark import DSpark

METHOD = DSpark()
VERIFIER = Verifier("some/target", ("Qwen3ForCausalLM",))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "draft",
    [
        {"markov": {"head": "gated", "rank": 6}, "confidence": {"with_markov": False}},
        {"rope_scaling": YARN, "num_heads": 2, "num_kv_heads": 2, "rope_theta": 5e5},
        {"target_layer_ids": (4, 0, 5), "confidence": {"enabled": False}},
    ],
)
def test_a_draft_survives_the_round_trip(draft, tmp_path: Path) -> None:
    shape = make_shape(**draft)
    model = METHOD.build(shape)
    model.init_weights(0)
    read, state = load_exported(export_speculators(model.state_dict(), shape, tmp_path / "draft", VERIFIER))
    assert state.keys() == model.state_dict().keys()
    for name in vars(shape):
        if name != "config":
            assert getattr(read, name) == getattr(shape, name), name
    for name in ("block_size", "rope_scaling", "num_layers", "markov"):
        assert getattr(read.config, name) == getattr(shape.config, name), name
    assert read.config.confidence.enabled == shape.config.confidence.enabled


def test_layers_are_counted_as_transformers_lists_states(tmp_path: Path) -> None:
    config = METHOD.speculators_config(make_shape(target_layer_ids=(0, 2, 5)), "bfloat16", VERIFIER)
    assert config["aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert METHOD.served_shape(config).layer_ids == (0, 2, 5)
    speculation = config["speculators_config"]
    assert speculation["verifier"] == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}
    assert speculation["proposal_methods"][0]["speculative_tokens"] == 4
    (tmp_path / "config.json").write_text(json.dumps(config["transformer_layer_config"]))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"] == 1e4


def test_what_speculators_computes_differently_is_refused(tmp_path: Path) -> None:
    windowed = make_shape(sliding_window=9)
    with pytest.raises(ValueError, match=r"draft\.sliding_window is 9, required none for speculators"):
        export_speculators(METHOD.build(windowed).state_dict(), windowed, tmp_path / "export", VERIFIER)
    assert not list(tmp_path.iterdir())
    config = METHOD.speculators_config(make_shape(), "bfloat16", VERIFIER)
    with pytest.raises(ValueError, match="a DSpark draft of 32 tokens, required all 40"):
        METHOD.served_shape(config | {"draft_vocab_size": 32})
    with pytest.raises(ValueError, match="lacks target_layer_ids"):
        METHOD.served_shape(config | {"aux_hidden_state_layer_ids": None})
