import json
from pathlib import Path
from typing import Any

import pytest

from specforge_config.target import TargetConfig, read_target_shape, target_revision

LLAMA = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 100}


def save(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_sparse_configurations_take_the_usual_defaults(tmp_path: Path) -> None:
    shape = read_target_shape(save(tmp_path, LLAMA))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.intermediate_size) == (4, 8, 8, 256)
    assert (shape.tied_head, shape.dtype, shape.rope_theta) == (False, "float32", 10000.0)


def test_given_sizes_win(tmp_path: Path) -> None:
    more = {
        "head_dim": 32,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 5e5},
        "dtype": "bfloat16",
    }
    shape = read_target_shape(save(tmp_path, LLAMA | more))
    assert (shape.head_dim, shape.num_kv_heads, shape.rope_theta, shape.dtype) == (32, 2, 5e5, "bfloat16")


def test_the_element_type_is_the_checkpoints_own_unless_it_is_set(tmp_path: Path) -> None:
    shape = read_target_shape(save(tmp_path, LLAMA | {"torch_dtype": "torch.float8_e4m3fn"}))
    assert TargetConfig(path=str(tmp_path), dtype="bfloat16").element_type(shape) == "bfloat16"
    with pytest.raises(ValueError, match=r"target\.dtype: the checkpoint's float8_e4m3fn cannot be captured"):
        TargetConfig(path=str(tmp_path)).element_type(shape)


def test_multimodal_targets_are_read_through_their_text(tmp_path: Path) -> None:
    shape = read_target_shape(save(tmp_path, {"model_type": "vl", "text_config": LLAMA}))
    assert shape.hidden_size == 64


def test_parameters_count_the_head_once_when_tied(tmp_path: Path) -> None:
    untied = read_target_shape(save(tmp_path, LLAMA)).parameters()
    tied = read_target_shape(save(tmp_path, LLAMA | {"tie_word_embeddings": True})).parameters()
    assert untied - tied == 100 * 64
    assert tied == 4 * (4 * 64 * 64 + 3 * 64 * 256) + 100 * 64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (None, "target.path: no config.json in"),
        ("{", "is not valid JSON"),
        ('{"hidden_size": 1}', "lacks num_hidden_layers, num_attention_heads, vocab_size"),
    ],
)
def test_folders_without_a_model_are_refused(tmp_path: Path, text: str | None, fault: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=fault):
        read_target_shape(tmp_path)


def test_revisions_follow_configuration_and_weight_files(tmp_path: Path) -> None:
    save(tmp_path, LLAMA)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    first = target_revision(tmp_path)
    (tmp_path / "README.md").write_text("notes")
    assert target_revision(tmp_path) == first
    assert len(first) == 16
    weights.write_bytes(b"12345")
    second = target_revision(tmp_path)
    save(tmp_path, LLAMA | {"vocab_size": 101})
    assert len({first, second, target_revision(tmp_path)}) == 3
