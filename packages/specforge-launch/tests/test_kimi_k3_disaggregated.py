"""Both disaggregated recipes of Kimi K3 are planned from the target's configuration and rows of prompts."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_launch import cli
from specforge_launch.plan import RunPlan, make_plan
from specforge_launch.recipe import SHIPPED

RECIPES = ("kimi-k3-dspark-disaggregated", "kimi-k3-dspark-disaggregated-smoke")
GIB = 1 << 30
TEXT = {
    "hidden_size": 7168,
    "intermediate_size": 33792,
    "num_hidden_layers": 93,
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}


@pytest.fixture
def overrides(tmp_path: Path) -> Callable[[int], list[str]]:
    """Points a recipe to a target without weights and so many rows."""
    target, rows = tmp_path / "k3", tmp_path / "rows.jsonl"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"text_config": TEXT}))

    def point(count: int) -> list[str]:
        row = json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
        rows.write_text(f"{row}\n" * count)
        return [f"target.path={target}", f"data.train={rows}"]

    return point


def planned(name: str, overrides: list[str]) -> tuple[RunConfig, RunPlan]:
    config = load_run(SHIPPED / f"{name}.yaml", overrides)
    return config, make_plan(config, name)


def test_the_run_is_sized_as_its_documentation_says(overrides: Callable[[int], list[str]]) -> None:
    config, plan = planned(RECIPES[0], overrides(462))
    assert plan.world_size == 4
    assert (plan.steps.global_batch_size, plan.steps.accumulation) == (128, 32)
    assert plan.steps.total_steps == 10 * (462 // 128)
    capture = plan.capture
    assert capture is not None
    assert capture.sample_bytes == 5.25 * GIB
    assert capture.window_bytes == 672 * GIB
    assert (capture.high_samples, capture.low_samples) == (128, 128)
    assert (capture.high_bytes, capture.low_bytes) == (800 * GIB, 650 * GIB)
    assert capture.store_bytes == 900 * GIB
    assert plan.memory.total < 80 * GIB
    assert "target weights" not in plan.memory.parts
    assert config.data.sha256 == "6d50e6bb9ee59095eed91bfba035081efef9fea43bece9ad5dd01c6648a8ef24"
    assert (config.schedule.kind, config.prompt_seed, config.seed) == ("constant", 1, 42)


@pytest.mark.parametrize(("name", "rows"), [(RECIPES[0], 462), (RECIPES[1], 4)])
def test_a_stop_has_time_for_what_is_in_flight_and_then_for_a_window(
    name: str, rows: int, overrides: Callable[[int], list[str]]
) -> None:
    """At the rates of docs/benchmarks.md, of two CPU cores, and at 10 Gbit/s."""
    config, plan = planned(name, overrides(rows))
    producer, capture = config.disaggregated.production, plan.capture
    assert capture is not None
    requests = producer.in_flight * capture.sample_bytes / (0.21 * GIB)
    window = max(capture.window_bytes / plan.world_size / (0.34 * GIB), capture.window_bytes * 8 / 1e10)
    assert max(requests, window) * 1.5 <= producer.drain_seconds / 2
    assert producer.drain_seconds <= producer.request_timeout_seconds


def test_the_server_is_started_for_one_sample_at_a_time(overrides: Callable[[int], list[str]]) -> None:
    _, plan = planned(RECIPES[0], overrides(462))
    assert plan.capture is not None
    store, server, _ = plan.capture.services
    given = dict(pairwise(server.command))
    wanted = {
        "--host": "10.0.0.1",
        "--port": "30000",
        "--tp-size": "8",
        "--context-length": "66048",
        "--max-total-tokens": "66048",
        "--max-running-requests": "1",
        "--chunked-prefill-size": "-1",
        "--attention-backend": "trtllm_mla",
        "--moe-runner-backend": "marlin",
        "--mem-fraction-static": "0.76",
        "--max-mamba-cache-size": "5",
        "--mamba-radix-cache-strategy": "extra_buffer",
        "--spec-capture-layer-ids": "7,23,51,67,83",
    }
    assert {name: given[name] for name in wanted} == wanted
    assert "--disable-cuda-graph" in server.command
    settings = json.loads(given["--spec-capture-store"])
    assert (settings["local_hostname"], settings["transfer_timeout_seconds"]) == ("10.0.0.1", 300)
    assert "--rpc_address=10.0.0.1" in store.command
    assert "--default_kv_lease_ttl=300000" in store.command


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_prints_what_each_node_runs(
    name: str,
    overrides: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["specforge-launch", "plan", name, *overrides(462)])
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    shown = capsys.readouterr().out
    for role in ("store", "server", "producer", "consumer"):
        assert f"--role {role}" in shown
    for text in ("10.0.0.1", "10.0.0.2", "5.2 GiB at data.max_length", "900.0 GiB"):
        assert text in shown


def test_the_smoke_is_one_update_of_the_same_run(overrides: Callable[[int], list[str]]) -> None:
    _, plan = planned(RECIPES[1], overrides(4))
    assert (plan.steps.total_steps, plan.steps.accumulation) == (1, 1)
    assert plan.capture is not None
    assert plan.capture.window_bytes == 21 * GIB
    run, smoke = (yaml.safe_load((SHIPPED / f"{name}.yaml").read_text()) for name in RECIPES)
    flat_run, flat_smoke = dict(flat(run)), dict(flat(smoke))
    differing = {
        key for key in flat_run.keys() | flat_smoke.keys() if flat_run.get(key) != flat_smoke.get(key)
    }
    assert differing == {
        "name",
        "data.train",
        "data.sha256",
        "training.epochs",
        "training.max_steps",
        "training.global_batch_size",
        "training.log_every",
        "deployment.producer.high_samples",
        "deployment.producer.low_samples",
    }


def flat(section: dict, prefix: str = "") -> list[tuple[str, object]]:
    pairs = []
    for key, value in section.items():
        pairs += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return pairs
