"""A tiny tokenizer and tiny targets that the tests of capture share.

This folder goes on the path for its helpers `feature_flow` and `ledger_parts`.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.targets.hf import HFTarget
from specforge_config.data import DataConfig
from specforge_config.features import CaptureSpec
from specforge_config.store import FileStore

sys.path.append(str(Path(__file__).parent))

from feature_flow import Flow, capturing, http_server, ten_prompts, two_rank_plan

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
VOCABULARY = 320
HIDDEN = 32


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE; ids 0 to 3 are end of text (pads), start and end of turn, and the mask token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(
        ["user assistant system hello there, how are you?\n\n think about it"] * 3, trainer
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        extra_special_tokens=["<|im_start|>"],
        name_or_path="tiny",
    )
    fast.chat_template = CHATML
    return fast


@pytest.fixture
def renderer(tokenizer: PreTrainedTokenizerFast) -> ChatRenderer:
    return ChatRenderer(tokenizer)


@pytest.fixture
def with_template(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Callable[..., ChatRenderer]:
    """Makes a renderer whose template comes from a file."""

    def make(template: str, **settings: Any) -> ChatRenderer:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        return ChatRenderer(tokenizer, path, **settings)

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes JSON lines; strings are written as they are."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    def make(*files: Path, **settings: Any) -> DataConfig:
        return DataConfig(train=tuple(map(str, files)), cache_dir=str(tmp_path / "cache"), **settings)

    return make


@pytest.fixture(scope="session")
def spec() -> CaptureSpec:
    """Three of four layers, the last among them."""
    return CaptureSpec(
        method="dspark",
        layer_ids=(0, 2, 3),
        final_state=True,
        dtype="float32",
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        target_revision="tiny",
        tokenizer_hash="tiny",
    )


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def target(qwen3_folder: Path, spec: CaptureSpec) -> Iterator[HFTarget]:
    target = HFTarget(qwen3_folder, spec)
    yield target
    target.close()


@pytest.fixture(scope="session", params=["qwen3", "llama"])
def target_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _saved_model(tmp_path_factory.mktemp(request.param), request.param)


def _saved_model(folder: Path, architecture: str) -> Path:
    """Random weights large enough that attention to a wrong token shows."""
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[architecture]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model_class(config).save_pretrained(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeatureStore]:
    store = open_store(FileStore(kind="files", folder=str(tmp_path / "objects")), contribute=False)
    yield store
    store.close()


@pytest.fixture
def flow(target: HFTarget, store: FeatureStore, tmp_path: Path, renderer: ChatRenderer) -> Iterator[Flow]:
    """A real target behind HTTP and a file store; four steps of four samples on two ranks."""
    prompts = ten_prompts(tmp_path, target.spec, renderer)
    with http_server(capturing(target, store)) as url:
        yield Flow(tmp_path / "run", store, prompts, two_rank_plan(prompts), target.spec, [url])
