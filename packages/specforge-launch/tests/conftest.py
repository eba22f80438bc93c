"""A recipe over a target that has a configuration and no weights: enough for all that loads no model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from specforge_config.loading import load_run
from specforge_config.run import RunConfig

TARGET = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Path of a small recipe with 40 training rows."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    rows = [json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}) for _ in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "eval.jsonl").write_text(rows[0] + "\n")
    path = tmp_path / "small.yaml"
    path.write_text(
        "# A small recipe.\n"
        + yaml.safe_dump(
            {
                "name": "small",
                "output_dir": str(tmp_path / "out"),
                "target": {"path": "target"},
                "data": {"train": "train.jsonl", "max_length": 32},
                "draft": {"method": "dspark", "num_layers": 2, "num_anchors": 4, "markov": {"rank": 8}},
                "training": {"batch_size": None, "global_batch_size": 4, "epochs": 2},
                "evaluation": {"prompts": "eval.jsonl"},
                "deployment": {"mode": "local_colocated", "trainer": {"device": "cpu"}},
            }
        )
    )
    return path


@pytest.fixture
def load(recipe: Path) -> Callable[..., RunConfig]:
    """Loads the small recipe under overrides."""
    return lambda *overrides: load_run(recipe, overrides)
