from collections.abc import Callable

from specforge_config.run import RunConfig
from specforge_launch.nodes import plan_nodes

Load = Callable[..., RunConfig]
RUN = "specforge-launch run r.yaml"
TWO_NODES = ("deployment.trainer.nnodes=2", "deployment.trainer.rendezvous=10.0.0.2:29500")
BY_ROLES = (
    "deployment.mode=disaggregated",
    "deployment.servers.addresses=[10.0.0.1:30000, 10.0.0.3:30001]",
    "deployment.store.master=10.0.0.1:50051",
)


def commands(config: RunConfig) -> dict[str, tuple[str, ...]]:
    return {node.host: node.commands for node in plan_nodes(config, "r.yaml")}


def test_one_node_runs_one_command(load: Load) -> None:
    assert commands(load()) == {"this node": (RUN,)}
    assert commands(load("deployment.mode=disaggregated", "deployment.managed=true")) == {"this node": (RUN,)}


def test_each_node_of_a_colocated_run_says_which_it_is(load: Load) -> None:
    assert commands(load(*TWO_NODES)) == {
        "10.0.0.2": (f"{RUN} --node-rank 0",),
        "node 1": (f"{RUN} --node-rank 1",),
    }


def test_several_nodes_each_run_their_roles(load: Load) -> None:
    assert commands(load(*BY_ROLES, *TWO_NODES)) == {
        "10.0.0.1": (f"{RUN} --role store", f"{RUN} --role server --node-rank 0"),
        "10.0.0.3": (f"{RUN} --role server --node-rank 1",),
        "10.0.0.2": (f"{RUN} --role producer", f"{RUN} --role consumer --node-rank 0"),
        "trainer node 1": (f"{RUN} --role consumer --node-rank 1",),
    }
    files = ("deployment.store.kind=files", "deployment.store.folder=f")
    one = commands(load(*BY_ROLES[:2], *files))
    assert one["trainer node"] == (f"{RUN} --role producer", f"{RUN} --role consumer")
