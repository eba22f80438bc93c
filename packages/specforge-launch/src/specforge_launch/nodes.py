"""What is typed on each machine of a run, in its order; machines are told apart by host."""

from dataclasses import dataclass

from specforge_config.base import host_and_port
from specforge_config.deployment import Disaggregated, TrainerNodes
from specforge_config.run import RunConfig
from specforge_config.store import MooncakeStore


@dataclass(frozen=True)
class NodePlan:
    """One machine of a run, and what is typed there."""

    host: str
    """Its address where the recipe has it, else what it is."""
    commands: tuple[str, ...]


def plan_nodes(config: RunConfig, source: str) -> tuple[NodePlan, ...]:
    """The commands of each machine.

    Args:
        config: the run.
        source: recipe and overrides, as they are typed.
    """
    run, deployment = f"specforge-launch run {source}", config.deployment
    trainer = deployment.trainer
    by_role = isinstance(deployment, Disaggregated) and not deployment.managed
    if not by_role and trainer.nnodes == 1:
        return (NodePlan("this node", (run,)),)
    typed: list[tuple[str, str]] = []
    if by_role:
        typed += _beside(deployment, run)
        typed.append((_trainer_host(trainer, 0, "trainer node"), f"{run} --role producer"))
        run = f"{run} --role consumer"
    for node in range(trainer.nnodes):
        rank = f" --node-rank {node}" if trainer.nnodes > 1 else ""
        typed.append((_trainer_host(trainer, node, "trainer node" if by_role else "node"), f"{run}{rank}"))
    hosts = dict.fromkeys(host for host, _ in typed)
    return tuple(NodePlan(host, tuple(line for at, line in typed if at == host)) for host in hosts)


def _beside(deployment: Disaggregated, run: str) -> list[tuple[str, str]]:
    """(host, command) of the store's master and each capture server."""
    typed = []
    if isinstance(deployment.store, MooncakeStore):
        typed.append((host_and_port(deployment.store.master)[0], f"{run} --role store"))
    for index, address in enumerate(deployment.servers.addresses):
        rank = f" --node-rank {index}" if deployment.num_servers > 1 else ""
        typed.append((host_and_port(address)[0], f"{run} --role server{rank}"))
    return typed


def _trainer_host(trainer: TrainerNodes, node: int, name: str) -> str:
    """The address of the ranks' first node, and names for the others."""
    if node == 0 and trainer.rendezvous:
        return host_and_port(trainer.rendezvous)[0]
    return f"{name} {node}" if trainer.nnodes > 1 else name
