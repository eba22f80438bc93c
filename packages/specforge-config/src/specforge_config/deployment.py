"""Where the run's processes stand: a union over deployments."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Tag

from specforge_config.base import Config, InputPath, host_and_port, tagged


class TrainerNodes(Config):
    """The ranks that train, started by torchrun."""

    nproc_per_node: PositiveInt = 1
    """Ranks on each node; one a GPU."""
    nnodes: PositiveInt = 1
    """Nodes of the run."""
    rendezvous: str | None = None
    """`host:port` of the first node that all nodes can reach; required above one node."""
    run_id: str = Field("specforge", pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the rendezvous; runs that share an endpoint need different ones."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; `auto` takes GPUs where the machine has them."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a collective may wait for a peer before the run is aborted."""
    cpu_threads: PositiveInt | None = None
    """Threads of each rank on a CPU; default: the node's cores over its ranks."""

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nnodes * self.nproc_per_node

    def _faults(self) -> Iterator[str]:
        if self.nnodes > 1 and self.rendezvous is None:
            yield f"nnodes is {self.nnodes} and rendezvous is unset; required: host:port of the first node"
        if self.rendezvous is not None:
            try:
                host_and_port(self.rendezvous)
            except ValueError as error:
                yield f"rendezvous is {error}"


class LocalColocated(Config):
    """Each trainer rank captures on demand with its own share of the target, then trains."""

    mode: Literal["local_colocated"] = "local_colocated"
    """Discriminator."""
    trainer: TrainerNodes = TrainerNodes()
    """The ranks."""


class Disaggregated(Config):
    """Capture servers write features to a store; trainer ranks consume them."""

    mode: Literal["disaggregated"]
    """Discriminator."""
    trainer: TrainerNodes = TrainerNodes()
    """The consuming ranks."""
    managed: bool = False
    """Whether one command starts store, servers, producer and consumers on this node."""
    servers: tuple[str, ...] = ()
    """Addresses of running capture servers."""
    store: str | None = None
    """Address of the feature store's master."""


class Offline(Config):
    """Ranks train on features that were captured before."""

    mode: Literal["offline"]
    """Discriminator."""
    trainer: TrainerNodes = TrainerNodes()
    """The ranks."""
    features: InputPath
    """Folder of stored features."""


DeploymentConfig = Annotated[
    Annotated[LocalColocated, Tag("local_colocated")]
    | Annotated[Disaggregated, Tag("disaggregated")]
    | Annotated[Offline, Tag("offline")],
    tagged("mode", "local_colocated"),
]
"""Where the run's processes stand."""
