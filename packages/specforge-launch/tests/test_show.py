from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from specforge_config.run import RunConfig
from specforge_launch.memory import MemoryPlan
from specforge_launch.plan import RunPlan, make_plan
from specforge_launch.show import bytes_text, counted, plan_tables, ranks_text

Load = Callable[..., RunConfig]
TWO_NODES = ("deployment.trainer.nnodes=2", "deployment.trainer.rendezvous=10.0.0.2:29500")
BY_ROLES = (
    "deployment.mode=disaggregated",
    "deployment.servers.addresses=[10.0.0.1:30000, 10.0.0.3:30001]",
    "deployment.store.master=10.0.0.1:50051",
    "target.backend=sglang",
)


def shown(plan: RunPlan) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for table in plan_tables(plan):
            console.print(table)
    return captured.get()


def row(text: str, name: str) -> str:
    """What stands beside a name, at its first place."""
    return next(line for line in text.splitlines() if line.startswith(f"{name} ")).removeprefix(name).strip()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_bytes_have_a_fitting_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_ranks_are_ranges() -> None:
    assert ranks_text([0, 1, 2, 3, 6, 8, 9]) == "0-3, 6, 8-9"
    assert ranks_text([]) == ""


def test_one_thing_is_no_plural() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_colocated_plan_shows_islands_and_what_each_node_is_to_type(load: Load) -> None:
    text = shown(make_plan(load(*TWO_NODES), "r.yaml"))
    assert row(text, "islands") == "2 of 1 rank: 0 | 1"
    assert row(text, "rendezvous") == "10.0.0.2:29500 (specforge)"
    assert row(text, "10.0.0.2") == "specforge-launch run r.yaml --node-rank 0"
    assert row(text, "node 1") == "specforge-launch run r.yaml --node-rank 1"
    assert "rendezvous" not in shown(make_plan(load()))


def test_an_order_by_length_is_told(load: Load) -> None:
    assert "by length" not in shown(make_plan(load()))
    assert row(shown(make_plan(load("data.group_by_length=50"))), "order") == "by length among 50 steps"


def test_a_disaggregated_plan_shows_every_process_and_no_islands(load: Load) -> None:
    text = shown(make_plan(load(*BY_ROLES, *TWO_NODES), "r.yaml"))
    assert "islands" not in text
    assert row(text, "server-1").startswith("on 127.0.0.1:30001, ")
    assert row(text, "consumer, node 0").startswith("ranks 0, ")
    assert row(text, "consumer, node 1").endswith(".launch.node1.yaml")
    assert "specforge_launch.worker" in row(text, "consumer, node 1")
    assert "predicted peak a server" in text
    assert "run r.yaml --role server --node-rank 1" in text
    one = shown(make_plan(load("deployment.mode=disaggregated", "deployment.managed=true")))
    assert row(one, "consumer").startswith("ranks 0, ")
    assert row(one, "server-0").startswith("on a free port of 127.0.0.1, ")
    assert "rendezvous" not in one


def test_a_peak_that_does_not_fit_is_marked_with_what_to_change(load: Load) -> None:
    plan = make_plan(load(*BY_ROLES))
    assert plan.capture is not None
    assert "does not fit" not in shown(plan)
    large = MemoryPlan({"draft activations": 5, "draft and teacher logits": 3, "optimizer states": 1}, 3)
    text = shown(replace(plan, memory=large))
    wanted = "lower data.max_length, training.batch_size, draft.num_anchors"
    assert row(text, "does not fit") == wanted
    server = MemoryPlan({"target weights": 90, "target activations": 20}, 80)
    text = shown(replace(plan, capture=replace(plan.capture, server_memory=server)))
    assert row(text, "does not fit") == "raise engine.tp_size"
