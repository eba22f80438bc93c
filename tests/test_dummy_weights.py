"""Runs over a target of random weights, of which only a configuration is there."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specforge_config.run import RunConfig
from specforge_launch import colocated
from specforge_launch.drafts import export_checkpoint
from specforge_launch.evaluation import Source, measure_draft
from specforge_launch.plan import make_plan
from specforge_launch.report import write_report
from specforge_launch.run_folder import RunFolder
from specforge_launch.show import DUMMY_WEIGHTS, plan_tables, summary_rows

ROOT = Path(__file__).resolve().parents[1]
STEPS = 3


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A run over twelve rows of tokens and a target's `config.json`."""
    (tmp_path / "target").mkdir()
    shutil.copy(ROOT / "recipes" / "tiny-target" / "config.json", tmp_path / "target")
    rows = [{"input_ids": list(range(20, 50 + row)), "loss_mask": [1] * (30 + row)} for row in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "output_dir": str(tmp_path / "run"),
        "target": {"path": str(tmp_path / "target"), "dtype": "float32"},
        "draft": {
            "num_layers": 1,
            "target_layer_ids": [0, 2],
            "num_anchors": 4,
            "block_size": 3,
            "mask_token_id": 1000,
            "markov": {"rank": 4},
        },
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "c")},
        "engine": {"load_format": "dummy"},
        "training": {"max_steps": STEPS, "log_every": 1},
        "evaluation": {"prompts": [str(tmp_path / "held-out.jsonl")], "max_new_tokens": 4},
        "deployment": {"trainer": {"device": "cpu", "cpu_threads": 1}},
    }


def run(settings: dict[str, Any]) -> RunConfig:
    """Train in this process."""
    held_out = Path(settings["evaluation"]["prompts"][0])
    held_out.write_text(json.dumps({"input_ids": list(range(20, 30)), "loss_mask": [0] * 9 + [1]}) + "\n")
    config = RunConfig.model_validate(settings)
    Path(config.folder).mkdir(exist_ok=True)
    try:
        colocated.run(config, started=time.time())
    finally:
        if dist.is_initialized():  # a run that fails leaves it to its process
            dist.destroy_process_group()
    return config


def test_every_output_says_so(settings: dict[str, Any]) -> None:
    config = run(settings)
    folder = RunFolder(config.folder)
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert len(rows) == STEPS
    assert all(row["dummy_weights"] for row in rows)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
    summary = folder.read_summary()
    assert summary is not None
    assert summary["dummy_weights"]
    assert summary_rows(summary)[0] == ("target", DUMMY_WEIGHTS)
    assert summary["startup_seconds"].keys() > {"launch", "prompts", "target", "draft", "first step"}
    assert DUMMY_WEIGHTS in write_report(folder.path).read_text()
    (table, *_) = plan_tables(make_plan(config))
    assert DUMMY_WEIGHTS in map(str, table.columns[1].cells)
    assert measure_draft(Source(str(folder.path)))["dummy_weights"]


def test_no_draft_of_it_reaches_a_server(settings: dict[str, Any]) -> None:
    config = run(settings)
    folder = RunFolder(config.folder)
    assert not folder.export.exists()
    assert "export" not in make_plan(config).outputs
    with pytest.raises(ValueError, match=r"engine\.load_format is dummy: .* random target"):
        export_checkpoint(config, None, folder.export)


def test_it_is_not_resumed_with_real_weights(settings: dict[str, Any]) -> None:
    run(settings)
    target = Path(settings["target"]["path"])
    shutil.copy(ROOT / "recipes" / "tiny-target" / "model.safetensors", target)
    real = {**settings, "engine": {}, "training": {"max_steps": STEPS + 1}}
    with pytest.raises(ValueError, match=r"load_format: 'auto' \(this run\) != 'dummy'"):
        run(real)
