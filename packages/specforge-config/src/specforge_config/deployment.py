"""Where the run's processes stand: a union over deployments."""

import os
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, Tag

from specforge_config.base import Config, InputPath, host_and_port, refused_addresses, repeated, tagged
from specforge_config.producer import ConsumerConfig, ProducerConfig
from specforge_config.store import MooncakeStore, StoreConfig


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """Threads that each rank computes with on the host; default: the node's cores over its ranks on a CPU,
    one beside a GPU."""

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nnodes * self.nproc_per_node

    def threads(self, *, on_gpu: bool) -> int:
        """Threads that each rank computes with on the host; cores are counted on this machine.

        Beside a GPU the host handles small arrays only. OpenMP's threads spin for a while after each
        operation and so hold every core; the next one waits until all of its threads have got one.
        """
        return self.cpu_threads or (1 if on_gpu else max(1, cores() // self.nproc_per_node))

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


class CaptureServers(Config):
    """The processes that run the target: SGLang with `target.backend` sglang, transformers with hf."""

    count: PositiveInt = 1
    """Servers that a managed run starts on its node."""
    addresses: tuple[str, ...] = ()
    """`host:port` of each server as the producer reaches it, unless the run is managed; the role `server` of
    node i listens on the i-th one's port."""
    host: str = Field("127.0.0.1", min_length=1)
    """Interface that a started server binds to; `0.0.0.0` is all of them."""
    port: int = Field(0, ge=0, lt=65536)
    """First port of a managed run's servers, the i-th takes `port + i`; 0 takes free ones."""
    python: InputPath | None = None
    """Interpreter with SGLang and specforge-capture; default: the launcher's own."""
    startup_seconds: PositiveFloat = 1800.0
    """How long a server may take to load the target."""

    def _faults(self) -> Iterator[str]:
        for error in refused_addresses(self.addresses):
            yield f"addresses holds {error}"
        for address in repeated(self.addresses):
            yield f"addresses lists {address} twice; required: each server once"
        if self.port and self.port + self.count > 65536:
            yield f"port is {self.port}, count is {self.count}; required: ports up to 65535"


class Disaggregated(Config):
    """Capture servers write features to a store; a producer tells them what to capture; trainer ranks
    consume."""

    mode: Literal["disaggregated"]
    """Discriminator."""
    trainer: TrainerNodes = TrainerNodes()
    """The consuming ranks."""
    managed: bool = False
    """Whether one command starts store, servers, producer and consumers on this node; otherwise each is
    started by its role."""
    servers: CaptureServers = CaptureServers()
    """The capture servers."""
    store: StoreConfig = MooncakeStore()
    """Where features wait."""
    producer: ProducerConfig = ProducerConfig()
    """What has prompts captured, ahead of the trainer."""
    consumer: ConsumerConfig = ConsumerConfig()
    """How ranks fetch features."""

    @property
    def num_servers(self) -> int:
        """Capture servers of the run."""
        return self.servers.count if self.managed else len(self.servers.addresses)

    @property
    def store_bytes(self) -> int | None:
        """What the store can hold; None for what a disk does."""
        if isinstance(self.store, MooncakeStore):
            return self.num_servers * self.store.capacity_bytes
        return self.store.capacity_bytes

    @property
    def production(self) -> ProducerConfig:
        """`producer`, its bytes limited by the store: by nine tenths of it, as a store that is nearly full
        finds no room for a large object."""
        if self.producer.high_bytes is not None or self.store_bytes is None:
            return self.producer
        return self.producer.model_copy(update={"high_bytes": self.store_bytes * 9 // 10})

    def _faults(self) -> Iterator[str]:
        if self.managed and self.trainer.nnodes > 1:
            yield (
                f"managed is true, trainer.nnodes is {self.trainer.nnodes}; required: one node, or managed "
                "false and servers.addresses"
            )
        if self.managed and self.servers.addresses:
            yield (
                "managed is true and servers.addresses is set; required: servers.count and servers.port, as "
                "the run starts its servers itself"
            )
        if not self.managed and not self.servers.addresses:
            yield "servers.addresses is empty; required: host:port of each capture server, or managed true"


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
