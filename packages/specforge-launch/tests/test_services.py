import json
from collections.abc import Callable
from itertools import pairwise

import pytest

from specforge_config.deployment import Disaggregated
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape
from specforge_launch.plan import make_plan
from specforge_launch.services import CapturePlan, plan_capture, server_store

Load = Callable[..., RunConfig]
MANAGED = ["deployment.mode=disaggregated", "deployment.managed=true"]
NODES = [
    "deployment.mode=disaggregated",
    "deployment.servers.addresses=[10.0.0.1:30000, 10.0.0.3:30001]",
    "deployment.servers.host=0.0.0.0",
    "deployment.store.master=10.0.0.1:50051",
    "deployment.trainer.nnodes=2",
    "deployment.trainer.rendezvous=10.0.0.2:29500",
    "target.backend=sglang",
]


def capture_of(config: RunConfig) -> CapturePlan:
    capture = make_plan(config).capture
    assert capture is not None
    return capture


def test_a_colocated_run_has_no_processes_beside_its_ranks(load: Load) -> None:
    assert make_plan(load()).capture is None


def test_a_window_is_sized_by_the_longest_sample(load: Load) -> None:
    capture = capture_of(load(*MANAGED, "draft.target_layer_ids=[0, 3, 6]"))
    assert capture.sample_bytes == 32 * (3 + 1) * 64 * 2
    assert capture.window_bytes == 4 * capture.sample_bytes
    assert (capture.high_samples, capture.low_samples) == (16, 8)
    assert json.loads(json.dumps(make_plan(load(*MANAGED)).to_json()))["capture"]["window_samples"] == 4


def test_a_window_larger_than_the_store_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match=r"deployment\.producer\.high_bytes is \d+; required: at least"):
        make_plan(load(*MANAGED, "deployment.store.capacity_bytes=100000"))


def test_a_managed_run_is_one_command_on_one_node(load: Load) -> None:
    plan = make_plan(load(*MANAGED, "deployment.servers.count=2", "deployment.servers.port=7000"), "r.yaml")
    capture = plan.capture
    assert capture is not None
    assert [service.name for service in capture.services] == ["store", "server-0", "server-1", "producer"]
    assert [service.address for service in capture.services[1:3]] == ["127.0.0.1:7000", "127.0.0.1:7001"]
    assert [node.commands for node in plan.nodes] == [("specforge-launch run r.yaml",)]


def test_servers_listen_where_the_recipe_says(load: Load) -> None:
    capture = capture_of(load(*NODES))
    assert [service.address for service in capture.services[1:3]] == ["0.0.0.0:30000", "0.0.0.0:30001"]


def test_a_server_is_started_with_the_engine_and_the_capture_of_the_run(load: Load) -> None:
    config = load(*NODES, "engine.tp_size=8", "draft.target_layer_ids=[1, 5]")
    command = capture_of(config).services[1].command
    assert command[1:3] == ("-m", "sglang.launch_server")
    values = dict(pairwise(command))
    assert (values["--host"], values["--port"], values["--tp-size"]) == ("0.0.0.0", "30000", "8")
    assert (values["--spec-capture-method"], values["--spec-capture-spec"]) == ("dspark", "CONTRACT")
    store = json.loads(values["--spec-capture-store"])
    assert (store["master"], store["local_hostname"]) == ("10.0.0.1:50051", "10.0.0.1")


def test_transformers_serve_where_the_backend_is_hf(load: Load) -> None:
    command = (
        capture_of(load(*MANAGED, "deployment.servers.port=7000", "engine.load_format=dummy"))
        .services[1]
        .command
    )
    assert command[1:4] == ("-m", "specforge_capture.cli", "serve")
    values = dict(pairwise(command))
    assert (values["--port"], values["--device"], values["--spec"]) == ("7000", "cpu", "CONTRACT")
    assert values["--dummy-seed"] == "42"


def test_a_server_puts_features_where_its_own_node_is_reached(load: Load) -> None:
    deployment = load(*NODES, "deployment.store.local_hostname=10.0.0.2").deployment
    assert isinstance(deployment, Disaggregated)
    hosts = [server_store(deployment, index).model_dump()["local_hostname"] for index in range(2)]
    assert hosts == ["10.0.0.1", "10.0.0.3"]


def test_managed_servers_take_the_gpus_behind_those_of_the_ranks(load: Load) -> None:
    config = load(*MANAGED, "target.backend=sglang", "engine.tp_size=2", "deployment.servers.count=2")
    target = read_target_shape(config.target.path)
    services = plan_capture(config, target, "cuda", 5).services
    assert [service.gpus for service in services] == [(), (1, 2), (3, 4), ()]
    with pytest.raises(ValueError, match="this machine has 4 GPUs; required: 5"):
        plan_capture(config, target, "cuda", 4)
