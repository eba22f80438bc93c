import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from specforge_config.target import TargetShape
from specforge_train.frozen import FrozenTarget, load_frozen, random_frozen

EMBEDDING, HEAD = torch.arange(24.0).view(8, 3), torch.arange(24.0, 48.0).view(8, 3)
LAYER = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)}


def write(
    folder: Path, tensors: dict[str, Tensor], config: dict | None = None, name: str = "model.safetensors"
) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": 8} | (config or {})))
    save_file(tensors, folder / name)
    return folder


def read(folder: Path, **keys: str) -> FrozenTarget:
    return load_frozen(folder, dtype=torch.float32, device="cpu", **keys)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_in_shards(tied: bool, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="6KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    frozen = read(tmp_path)
    assert torch.equal(frozen.embedding, model.model.embed_tokens.weight)
    assert torch.equal(frozen.head, model.lm_head.weight)
    assert (frozen.head.data_ptr() == frozen.embedding.data_ptr()) == tied


@pytest.mark.parametrize("tied", [False, True])
def test_beside_dummy_weights_they_are_random_at_the_real_shape(tied: bool) -> None:
    shape = TargetShape(64, 128, 4, 4, 2, 16, 512, 4096, 1e-6, 1e4, "bfloat16", tied)
    frozen, again = (random_frozen(shape, seed=3, dtype=torch.bfloat16, device="cpu") for _ in range(2))
    assert frozen.dummy
    assert frozen.embedding.shape == frozen.head.shape == (512, 64)
    assert frozen.embedding.dtype == torch.bfloat16
    assert (frozen.head.data_ptr() == frozen.embedding.data_ptr()) == tied
    assert torch.equal(frozen.embedding, again.embedding)
    assert torch.equal(frozen.head, again.head)
    assert 0.019 < frozen.head.float().std() < 0.021
    other = random_frozen(shape, seed=4, dtype=torch.bfloat16, device="cpu")
    assert not torch.equal(frozen.head, other.head)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_nested_prefixes(prefix: str, tmp_path: Path) -> None:
    head = (
        prefix.replace("model.", "", 1) if prefix == "model." else prefix.replace("model.language_model.", "")
    )
    tensors = {f"{prefix}embed_tokens.weight": EMBEDDING, f"{head}lm_head.weight": HEAD, **LAYER}
    frozen = read(write(tmp_path, tensors, {"vocab_size": 1, "text_config": {"vocab_size": 8}}))
    assert torch.equal(frozen.embedding, EMBEDDING)
    assert torch.equal(frozen.head, HEAD)


def test_one_shard_without_an_index(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    frozen = read(write(tmp_path, tensors, name="model-00001-of-00001.safetensors"))
    assert torch.equal(frozen.head, HEAD)


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {}])
def test_a_head_that_is_not_stored_is_the_embedding(config: dict, tmp_path: Path) -> None:
    frozen = read(write(tmp_path, {"model.embed_tokens.weight": EMBEDDING, **LAYER}, config))
    assert frozen.head is frozen.embedding


def test_a_missing_head_of_an_untied_target_lists_the_keys(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"model.embed_tokens.weight": EMBEDDING, "score": HEAD, **LAYER},
        {"tie_word_embeddings": False},
    )
    with pytest.raises(ValueError, match=r"target\.head_key.*2 of 3.*model\.embed_tokens\.weight, score"):
        read(tmp_path)
    assert torch.equal(read(tmp_path, head_key="score").head, HEAD)


def test_ambiguous_keys_are_named(tmp_path: Path) -> None:
    tensors = {
        "a.embed_tokens.weight": EMBEDDING,
        "b.embed_tokens.weight": HEAD.clone(),
        "lm_head.weight": HEAD,
    }
    write(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"several keys.*a\.embed.*b\.embed.*target\.embedding_key"):
        read(tmp_path)
    assert torch.equal(read(tmp_path, embedding_key="b.embed_tokens.weight").embedding, HEAD)


def test_copies_inside_layers_are_not_the_targets(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}
    inside = {
        "model.layers.6.embed_tokens.weight": HEAD.clone(),
        "model.layers.6.lm_head.weight": EMBEDDING.clone(),
    }
    frozen = read(write(tmp_path, tensors | inside))
    assert torch.equal(frozen.embedding, EMBEDDING)
    assert torch.equal(frozen.head, HEAD)


def test_a_key_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD})
    with pytest.raises(
        ValueError, match=r"target\.head_key is 'head'.*lm_head\.weight, model\.embed_tokens\.weight"
    ):
        read(tmp_path, head_key="head")


def test_an_index_that_names_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path, {"model.embed_tokens.weight": EMBEDDING})
    weights = {"model.embed_tokens.weight": "model.safetensors", "lm_head.weight": "lost.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(ValueError, match=r"lm_head\.weight in .*lost\.safetensors, which does not exist"):
        read(tmp_path)


@pytest.mark.parametrize("rows", [7, 9])
def test_a_vocabulary_of_another_size_is_refused(rows: int, tmp_path: Path) -> None:
    write(tmp_path, {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}, {"vocab_size": rows})
    with pytest.raises(ValueError, match=rf"\[8, 3\].*V = {rows}"):
        read(tmp_path)


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no safetensors.*pytorch_model\.bin"):
        read(tmp_path)


def test_values_take_the_wanted_type(tmp_path: Path) -> None:
    write(tmp_path, {"model.embed_tokens.weight": EMBEDDING.bfloat16(), "lm_head.weight": HEAD})
    frozen = load_frozen(tmp_path, dtype=torch.float16, device="cpu")
    assert frozen.embedding.dtype == frozen.head.dtype == torch.float16
    assert torch.equal(frozen.embedding, EMBEDDING.half())
