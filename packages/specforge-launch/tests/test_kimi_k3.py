"""The Kimi K3 recipe is planned from two small JSON files."""

import json
from pathlib import Path

import pytest

from specforge_config.loading import load_run
from specforge_config.target import read_target_shape
from specforge_launch import cli
from specforge_launch.memory import draft_parameters
from specforge_launch.plan import make_plan
from specforge_launch.recipe import SHIPPED

RECIPE = SHIPPED / "kimi-k3-dspark-colocated-hsdp.yaml"
TEXT = {
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_hidden_layers": 93,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
WEIGHT_BYTES = 1_030_000_000_000


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    (tmp_path / "k3").mkdir()
    (tmp_path / "k3" / "config.json").write_text(json.dumps({"text_config": TEXT}))
    index = {"metadata": {"total_size": WEIGHT_BYTES}, "weight_map": {}}
    (tmp_path / "k3" / "model.safetensors.index.json").write_text(json.dumps(index))
    rows = [json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})] * 462
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return [f"target.path={tmp_path / 'k3'}", f"data.train={tmp_path / 'rows.jsonl'}"]


def test_the_plan_of_32_ranks(overrides: list[str]) -> None:
    plan = make_plan(load_run(RECIPE, overrides))
    assert plan.world_size == 32
    assert plan.islands == tuple(tuple(range(8 * node, 8 * node + 8)) for node in range(4))
    assert plan.mesh == (4, 8)
    assert [(p.node, p.local_rank, p.device) for p in plan.processes[14:17]] == [
        (1, 6, "cuda:6"),
        (1, 7, "cuda:7"),
        (2, 0, "cuda:0"),
    ]
    assert plan.steps.global_batch_size == 128 == 32 * plan.steps.accumulation
    assert plan.steps.total_steps == 10 * (462 // 128)
    assert plan.engine_args["max_running_requests"] == 8
    assert plan.engine_args["max_total_tokens"] == 8 * 8320
    parts = plan.memory.parts
    assert parts["target weights"] == WEIGHT_BYTES // 8
    assert parts["engine's token pool"] == 8 * 8320 * 93 * 576 * 2
    captured = parts["an island's states, while it captures"]
    assert captured == 8 * parts["features of staged batches"] == 8 * 8192 * 6 * 7168 * 2
    config = load_run(RECIPE, overrides)
    assert config.draft.method == "dspark"
    parameters = draft_parameters(config.draft, read_target_shape(config.target.path))
    assert parts["optimizer states"] == 8 * parameters // 8


def test_it_prints(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["specforge-launch", "plan", str(RECIPE), *overrides])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    shown = capsys.readouterr().out
    for text in (
        "32 ranks on 4 nodes",
        "0-7 | 8-15 | 16-23 | 24-31",
        "4 replicas x 8 shards",
        "--node-rank 3",
    ):
        assert text in shown
