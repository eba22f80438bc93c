"""A saved target with a tokenizer, and rows to answer."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from specforge_config.run import RunConfig

ROWS = [
    {"messages": [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "old"}]},
    {"messages": [{"role": "user", "content": word} for word in ("how", "are", "you")]},
    *({"messages": [{"role": "user", "content": "think " * n}]} for n in range(1, 8)),
]


@pytest.fixture(scope="session")
def answering_target(
    qwen3_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Random weights: under sampling some answers end with a stop token, others at the limit."""
    folder = tmp_path_factory.mktemp("answering")
    shutil.copytree(qwen3_folder, folder, dirs_exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(
    answering_target: Path, write_rows: Callable[..., Path], tmp_path: Path
) -> Callable[..., RunConfig]:
    """Makes a run whose `regeneration` has the given settings."""
    prompts = write_rows(*ROWS)

    def make(
        data: dict[str, Any] | None = None, target: Path = answering_target, **settings: Any
    ) -> RunConfig:
        regeneration = {
            "prompts": str(prompts), "output": str(tmp_path / "out" / "answers.jsonl"), "max_new_tokens": 40,
            "temperature": 1.0, "top_p": 0.98, "batch_size": 4, **settings,
        }  # fmt: skip
        return RunConfig.model_validate({
            "target": {"path": str(target), "dtype": "float32"},
            "data": {"train": "unused.jsonl", "max_length": 200, **(data or {})},
            "regeneration": regeneration,
            "deployment": {"trainer": {"device": "cpu"}},
        })  # fmt: skip

    return make
