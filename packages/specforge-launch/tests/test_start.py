import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from specforge_config.run import RunConfig
from specforge_launch.plan import make_plan
from specforge_launch.services import Role
from specforge_launch.start import start
from specforge_launch.supervise import services_of

Load = Callable[..., RunConfig]
MANAGED = ("deployment.mode=disaggregated", "deployment.managed=true")
NODES = (
    "deployment.mode=disaggregated",
    "deployment.servers.addresses=[10.0.0.1:30000, 10.0.0.3:30000]",
    "target.backend=sglang",
)


@pytest.mark.parametrize(
    ("overrides", "role", "node", "message"),
    [
        ((), "server", 0, "--role is server, but deployment.mode is local_colocated"),
        ((), None, 1, "--node-rank is 1, required less than deployment.trainer.nnodes=1"),
        (MANAGED, "store", 0, "--role is store, but deployment.managed is true"),
        (NODES, None, 0, r"10\.0\.0\.3:  specforge-launch run r\.yaml --role server --node-rank 1"),
        (NODES, "server", 2, "--node-rank is 2, required less than the 2 of deployment.servers.addresses"),
        (NODES, "producer", 1, "--node-rank is 1"),
        (
            (*NODES, "deployment.store.kind=files", "deployment.store.folder=f"),
            "store",
            0,
            "--role is store, but this run has no such process",
        ),
    ],
)
def test_a_part_that_the_run_does_not_have_is_refused(
    load: Load, overrides: tuple[str, ...], role: Role | None, node: int, message: str
) -> None:
    config = load(*overrides)
    with pytest.raises(ValueError, match=message):
        start(config, make_plan(config, "r.yaml"), node, Console(), Console(), role)


def test_other_training_files_than_the_recipes_are_refused_before_anything_starts(load: Load) -> None:
    config = load(f"data.sha256={'a' * 64}")
    found = hashlib.sha256(Path(config.data.train[0]).read_bytes()).hexdigest()
    with pytest.raises(ValueError, match=f"its sha256 is {found}"):
        start(config, make_plan(config), 0, Console(), Console())
    assert not Path(config.folder).exists()


def test_each_node_starts_what_belongs_to_it(load: Load) -> None:
    plan = make_plan(load(*NODES))
    assert [s.name for s in services_of(plan, 1, "server")] == ["server-1"]
    assert [s.name for s in services_of(plan, 0, "store")] == ["store"]
    assert services_of(plan, 0, "consumer") == []
    managed = make_plan(load(*MANAGED, "deployment.servers.count=2"))
    assert [s.name for s in services_of(managed, 0, None)] == ["store", "server-0", "server-1", "producer"]
    assert services_of(make_plan(load()), 0, None) == []
