import pytest
from pydantic import ValidationError

from specforge_config.deployment import TrainerNodes


@pytest.mark.parametrize("address", ["10.0.0.1:29500", "node-0.cluster:1", "[fe80::1]:65535"])
def test_nodes_multiply_ranks(address: str) -> None:
    assert TrainerNodes(nnodes=2, nproc_per_node=4, rendezvous=address).world_size == 8


@pytest.mark.parametrize(
    "address", ["host", "host:", ":29500", "host:0", "host:65536", "a b:1", "::1:29500", ""]
)
def test_rendezvous_is_host_and_port(address: str) -> None:
    with pytest.raises(ValidationError, match="required: host:port with a port of 1 to 65535"):
        TrainerNodes(nnodes=2, rendezvous=address)


def test_several_nodes_need_a_rendezvous() -> None:
    with pytest.raises(ValidationError, match="nnodes is 2 and rendezvous is unset"):
        TrainerNodes(nnodes=2)
