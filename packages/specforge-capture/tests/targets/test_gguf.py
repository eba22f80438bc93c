import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specforge_capture.prompts.chat import ChatRenderer, load_tokenizer
from specforge_capture.prompts.special_tokens import resolve_special_tokens
from specforge_capture.targets import gguf
from specforge_capture.targets.gguf import conversion_key, with_saved_target
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape

sys.path.insert(0, str(Path(__file__).parent))

from tiny_gguf import HIDDEN, LAYERS, NAME, write_gguf


@pytest.fixture
def config(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> RunConfig:
    write_gguf(tmp_path, tokenizer)
    target = {"path": str(tmp_path), "gguf_file": NAME, "cache_dir": str(tmp_path / "cache")}
    return RunConfig.model_validate({"target": target, "data": {"train": "a"}})


def test_a_converted_target_is_the_files_model(config: RunConfig) -> None:
    saved = with_saved_target(config).target
    assert saved.gguf_file is None
    shape = read_target_shape(saved.path)
    assert (shape.hidden_size, shape.num_layers, shape.tied_head) == (HIDDEN, LAYERS, True)
    direct = AutoModelForCausalLM.from_pretrained(config.target.path, gguf_file=NAME, **gguf.dequantised())
    again = AutoModelForCausalLM.from_pretrained(saved.path)
    for (name, wanted), (same, found) in zip(
        direct.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == same
        assert torch.equal(wanted, found), name
    with safe_open(Path(saved.path) / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in list(file.keys())


def test_answers_end_where_the_template_ends_them(config: RunConfig) -> None:
    saved = with_saved_target(config).target
    tokenizer = load_tokenizer(saved.path)
    # The trap: neither names what ends an answer, and nothing pads.
    assert tokenizer.bos_token == tokenizer.eos_token == "<|im_start|>"
    assert tokenizer.pad_token is None
    special = resolve_special_tokens(tokenizer, saved.path, ChatRenderer(tokenizer))
    assert set(special.stop) == {1, 2}
    generation = json.loads((Path(saved.path) / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == {1, 2}
    assert generation["pad_token_id"] == special.pad


def test_the_converted_tokenizer_splits_as_the_original(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = "<|im_start|>user\nhow are you?<|im_end|>\n"
    saved = load_tokenizer(with_saved_target(config).target.path)
    assert saved.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert saved.chat_template == tokenizer.chat_template


def test_another_file_or_type_is_another_conversion(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = Path(config.target.path) / NAME
    first = conversion_key(path, "auto")
    assert conversion_key(path, "bfloat16") != first
    write_gguf(path.parent, tokenizer, seed=1)
    assert conversion_key(path, "auto") != first


def test_who_comes_second_waits_for_the_first(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    convert_into, conversions = gguf._convert_into, []

    def counted(*arguments: Any) -> None:
        conversions.append(arguments)
        convert_into(*arguments)

    monkeypatch.setattr(gguf, "_convert_into", counted)
    # A flock belongs to an open file, so threads exclude each other as processes do.
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(gguf.convert, [config.target] * 3))
    assert len(folders) == len(conversions) == 1
    cache = Path(config.target.cache_dir)
    assert {path.suffix for path in cache.iterdir()} == {"", ".lock"}


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no file"), (b"PK\x03\x04 a zip", "no GGUF file: it begins with b'PK")]
)
def test_what_is_no_gguf_file_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / NAME).write_bytes(content)
    target = {"path": str(tmp_path), "gguf_file": NAME, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match=message):
        with_saved_target(RunConfig.model_validate({"target": target, "data": {"train": "a"}}))
    assert not (tmp_path / "cache").exists()


def test_a_broken_file_leaves_nothing_behind(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"transformers cannot read .*tiny\.gguf"):
        with_saved_target(config)
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]
