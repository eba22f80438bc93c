import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specforge_config.run import RunConfig
from specforge_launch.machine import main_memory
from specforge_launch.plan import agent_arguments, count_rows, make_plan

Load = Callable[..., RunConfig]


def test_the_json_of_a_plan_holds_what_a_launch_decides(load: Load) -> None:
    plan = json.loads(json.dumps(make_plan(load("deployment.trainer.nproc_per_node=2")).to_json()))
    assert plan["world_size"] == 2
    assert plan["tp_size"] == 1
    assert plan["islands"] == [[0], [1]]
    assert [(p["rank"], p["node"], p["local_rank"], p["device"]) for p in plan["processes"]] == [
        (0, 0, 0, "cpu"),
        (1, 0, 1, "cpu"),
    ]
    assert plan["engine_args"]["dtype"] == "bfloat16"
    assert plan["engine_args"]["max_batch_tokens"] == 2 * 32
    assert plan["memory"]["total"] == sum(plan["memory"]["parts"].values())
    assert plan["memory"]["fits"] is True
    assert plan["memory"]["to_lower"] == plan["memory"]["to_raise"] == []
    assert plan["nodes"] == [{"host": "this node", "commands": ["specforge-launch run RECIPE"]}]
    assert plan["rows"] == 40
    assert plan["steps_per_epoch"] == 10
    assert plan["total_steps"] == 20
    assert plan["outputs"]["summary"].endswith("out/summary.json")


def test_the_json_of_a_disaggregated_plan_holds_a_servers_memory(load: Load) -> None:
    managed = ("deployment.mode=disaggregated", "deployment.managed=true")
    capture = json.loads(json.dumps(make_plan(load(*managed)).to_json()))["capture"]
    memory = capture["server_memory"]
    assert memory["total"] == sum(memory["parts"].values())
    assert memory["parts"]["target weights"] > 0
    assert memory["capacity"] == main_memory()
    assert memory["fits"] is True


def test_a_rank_beside_a_gpu_takes_one_thread_of_the_host(load: Load) -> None:
    assert make_plan(load("deployment.trainer.device=cuda")).threads_per_rank == 1
    assert (
        make_plan(load("deployment.trainer.device=cuda", "deployment.trainer.cpu_threads=3")).threads_per_rank
        == 3
    )


def test_max_steps_ends_a_run_early(load: Load) -> None:
    assert make_plan(load("training.max_steps=7")).total_steps == 7
    assert make_plan(load("training.max_steps=700")).total_steps == 20


def test_the_same_configuration_gives_the_same_plan(load: Load) -> None:
    assert make_plan(load()) == make_plan(load())


def test_one_node_meets_on_a_free_port_and_several_on_their_rendezvous(load: Load) -> None:
    alone = agent_arguments(make_plan(load()), node=0)
    assert "--rdzv-backend=c10d" in alone
    assert "--rdzv-endpoint=127.0.0.1:0" in alone
    nodes = ["deployment.trainer.nnodes=2", "deployment.trainer.rendezvous=10.0.0.1:29500"]
    plan = make_plan(load(*nodes, "deployment.trainer.nproc_per_node=2"))
    assert [(p.rank, p.node, p.local_rank) for p in plan.processes] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    second = agent_arguments(plan, node=1)
    assert {"--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-backend=static"} <= set(second)
    assert {"--master-addr=10.0.0.1", "--master-port=29500"} <= set(second)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tracking.trackers=[wandb]", "not implemented yet: tracking.trackers"),
    ],
)
def test_settings_that_are_not_built_are_refused(load: Load, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan(load(override))


def test_a_run_shorter_than_a_step_is_an_error_that_names_the_setting(load: Load) -> None:
    with pytest.raises(ValueError, match=r"40 rows.*training\.global_batch_size=64"):
        make_plan(load("training.global_batch_size=64"))


def test_a_checkpoint_in_another_element_type_is_refused_until_one_is_set(load: Load) -> None:
    path = Path(load().target.path) / "config.json"
    path.write_text(path.read_text().replace('"bfloat16"', '"float8_e4m3fn"'))
    with pytest.raises(ValueError, match=r"target\.dtype: the checkpoint's float8_e4m3fn cannot be captured"):
        make_plan(load())
    assert make_plan(load("target.dtype=bfloat16")).engine_args["dtype"] == "bfloat16"


def test_rows_are_counted_in_both_formats(tmp_path: Path) -> None:
    from pyarrow import parquet, table

    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}')
    parquet.write_table(table({"text": ["a", "b", "c"]}), tmp_path / "a.parquet")
    assert count_rows(str(tmp_path / "a.jsonl")) == 2
    assert count_rows(str(tmp_path / "a.parquet")) == 3
    with pytest.raises(ValueError, match=r"data\.train: no file"):
        count_rows(str(tmp_path / "missing.jsonl"))
