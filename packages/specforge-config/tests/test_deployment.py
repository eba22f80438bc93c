from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.deployment import Disaggregated, TrainerNodes, cores


@pytest.mark.parametrize("address", ["10.0.0.1:29500", "node-0.cluster:1", "[fe80::1]:65535"])
def test_nodes_multiply_ranks(address: str) -> None:
    assert TrainerNodes(nnodes=2, nproc_per_node=4, rendezvous=address).world_size == 8


def test_ranks_share_the_cores_on_a_cpu_and_take_one_beside_a_gpu() -> None:
    alone, many = TrainerNodes(), TrainerNodes(nproc_per_node=1024)
    assert alone.threads(on_gpu=False) == cores()
    assert many.threads(on_gpu=False) == alone.threads(on_gpu=True) == 1
    assert {TrainerNodes(cpu_threads=4).threads(on_gpu=on_gpu) for on_gpu in (True, False)} == {4}


@pytest.mark.parametrize(
    "address", ["host", "host:", ":29500", "host:0", "host:65536", "a b:1", "::1:29500", ""]
)
def test_rendezvous_is_host_and_port(address: str) -> None:
    with pytest.raises(ValidationError, match="required: host:port with a port of 1 to 65535"):
        TrainerNodes(nnodes=2, rendezvous=address)


def test_several_nodes_need_a_rendezvous() -> None:
    with pytest.raises(ValidationError, match="nnodes is 2 and rendezvous is unset"):
        TrainerNodes(nnodes=2)


def disaggregated(**fields: Any) -> Disaggregated:
    return Disaggregated.model_validate({"mode": "disaggregated"} | fields)


def test_servers_are_started_or_addressed() -> None:
    assert disaggregated(managed=True, servers={"count": 3}).num_servers == 3
    servers = {"addresses": ["10.0.0.1:30000", "10.0.0.2:30000"]}
    assert disaggregated(servers=servers, trainer={"nnodes": 2, "rendezvous": "a:1"}).num_servers == 2


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({}, "servers.addresses is empty; required: host:port of each capture server, or managed true"),
        (
            {"managed": True, "trainer": {"nnodes": 2, "rendezvous": "a:1"}},
            "managed is true, trainer.nnodes is 2; required: one node",
        ),
        (
            {"managed": True, "servers": {"addresses": ["a:1"]}},
            "managed is true and servers.addresses is set",
        ),
        ({"servers": {"addresses": ["a"]}}, "addresses holds 'a'; required: host:port"),
        ({"servers": {"addresses": ["a:1", "a:1"]}}, "addresses lists a:1 twice"),
        ({"managed": True, "servers": {"port": 65535, "count": 2}}, "required: ports up to 65535"),
    ],
)
def test_servers_that_nobody_starts_or_reaches_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        disaggregated(**fields)
    assert fault in str(caught.value)


def test_production_stops_before_the_store_is_full() -> None:
    store = {"capacity_bytes": 100}
    full = disaggregated(managed=True, servers={"count": 2}, store=store)
    assert full.production.high_bytes == 180
    assert disaggregated(managed=True, store=store, producer={"high_bytes": 50}).production.high_bytes == 50
    on_disk = {"kind": "files", "folder": "f"}
    assert disaggregated(managed=True, store=on_disk).production.high_bytes is None
