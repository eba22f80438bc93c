"""The processes beside the ranks of a disaggregated run: the store's master, capture servers, the producer.

Pure: where each stands, what it is started with, what memory it takes, what passes through the store. A
server's command holds the capture contract, which is settled only when it starts; the plan shows `CONTRACT`
in its place.
"""

import json
import sys
from dataclasses import dataclass
from typing import Literal, get_args

from specforge_capture.sglang.engine_args import resolve_engine_arguments
from specforge_capture.stores.master import MasterSettings
from specforge_config.base import host_and_port
from specforge_config.deployment import Disaggregated
from specforge_config.draft import default_layer_ids
from specforge_config.run import RunConfig
from specforge_config.store import FileStore, MooncakeStore
from specforge_config.target import TargetShape
from specforge_launch.memory import MemoryPlan, element_bytes, predict_server

Role = Literal["store", "server", "producer", "consumer"]
ROLES: tuple[Role, ...] = get_args(Role)
CONTRACT = "CONTRACT"
"""Stands in a planned command for the JSON of the capture contract."""


@dataclass(frozen=True)
class Service:
    """One process."""

    role: Role
    index: int
    address: str
    """`host:port` that it listens on, port 0 for a free one; empty for the producer."""
    gpus: tuple[int, ...]
    """GPUs that a managed run gives it; empty for all that it finds."""
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        """What it is called in messages and log files."""
        return f"{self.role}-{self.index}" if self.role == "server" else self.role


@dataclass(frozen=True)
class CapturePlan:
    """How features come to the ranks of a disaggregated run."""

    services: tuple[Service, ...]
    sample_bytes: int
    """Features of a sample of `data.max_length` tokens."""
    window_samples: int
    """Samples of an optimizer window, which is dispatched and freed as a whole."""
    store_bytes: int | None
    """What the store can hold; None for what a disk does."""
    high_samples: int
    low_samples: int
    high_bytes: int | None
    low_bytes: int | None
    server_memory: MemoryPlan
    """The peak of each of a server's ranks."""

    @property
    def window_bytes(self) -> int:
        """Features of an optimizer window of the longest samples."""
        return self.window_samples * self.sample_bytes


def plan_capture(
    config: RunConfig,
    target: TargetShape,
    device: Literal["cpu", "cuda"],
    num_gpus: int,
    capacity: int | None = None,
) -> CapturePlan:
    """Plan the processes beside the ranks.

    Args:
        config: a disaggregated run.
        target: the target's shape.
        device: where servers compute.
        num_gpus: GPUs of this machine; 0 where there are none, or on another machine than the run's.
        capacity: bytes that each of a server's ranks has; None where unknown.

    Raises:
        ValueError: if an optimizer window does not fit between the watermarks, or a managed run asks for more
            GPUs than there are.
    """
    deployment = config.disaggregated
    layers = config.draft.target_layer_ids or default_layer_ids(target.num_layers)
    width = (len(layers) + (config.draft.method != "dflash")) * target.hidden_size
    states = width * element_bytes(config, target)
    sample, window = config.data.max_length * states, config.batches.global_batch_size
    marks = deployment.production.watermarks(window, window * sample)
    return CapturePlan(
        services=_services(config, target, device, num_gpus),
        sample_bytes=sample,
        window_samples=window,
        store_bytes=deployment.store_bytes,
        high_samples=marks.high_samples,
        low_samples=marks.low_samples,
        high_bytes=marks.high_bytes,
        low_bytes=marks.low_bytes,
        server_memory=predict_server(config, target, states, on_gpu=device == "cuda", capacity=capacity),
    )


def master_of(store: MooncakeStore, metrics_port: int) -> MasterSettings:
    """The store's master, where the recipe says."""
    host, port = host_and_port(store.master)
    return MasterSettings(host, port, metrics_port, store.lease_seconds)


def server_address(deployment: Disaggregated, index: int) -> tuple[str, int]:
    """Interface and port that a server binds to; port 0 for a free one."""
    servers = deployment.servers
    if deployment.managed:
        return servers.host, servers.port + index if servers.port else 0
    return servers.host, host_and_port(servers.addresses[index])[1]


def server_store(deployment: Disaggregated, index: int) -> MooncakeStore | FileStore:
    """The store's settings for a server: what it puts is fetched at the address under which it is known."""
    store = deployment.store
    if deployment.managed or isinstance(store, FileStore):
        return store
    return store.model_copy(update={"local_hostname": host_and_port(deployment.servers.addresses[index])[0]})


def server_command(
    config: RunConfig,
    target: TargetShape,
    device: Literal["cpu", "cuda"],
    index: int,
    port: int,
    contract: str = CONTRACT,
) -> tuple[str, ...]:
    """The command of a capture server.

    Args:
        config: a disaggregated run.
        target: the target's shape.
        device: where it computes.
        index: which of the run's servers.
        port: where it listens.
        contract: the capture contract as JSON.

    Raises:
        ValueError: a line for each setting that the engine cannot serve with.
    """
    deployment = config.disaggregated
    store, host = json.dumps(server_store(deployment, index).model_dump(mode="json")), deployment.servers.host
    python = deployment.servers.python or sys.executable
    listen = ("--host", host, "--port", str(port))
    if config.target.backend == "hf":
        weights = ("--dummy-seed", str(config.seed)) if config.dummy_weights else ()
        capture = ("--spec", contract, "--store", store, "--device", device, *weights)
        return (python, "-m", "specforge_capture.cli", "serve", config.target.path, *listen, *capture)
    layers = config.draft.target_layer_ids or default_layer_ids(target.num_layers)
    quiet = ("--log-level", "warning", "--log-level-http", "warning")  # one line a prefill otherwise
    capture = (
        "--enable-spec-capture",
        *("--spec-capture-method", config.draft.method),
        *("--spec-capture-layer-ids", ",".join(map(str, layers))),
        *("--spec-capture-store", store),
        *("--spec-capture-spec", contract),
    )
    engine = resolve_engine_arguments(config, target, device).command_line()
    return (python, "-m", "sglang.launch_server", *listen, *quiet, *engine, *capture)


def _services(
    config: RunConfig, target: TargetShape, device: Literal["cpu", "cuda"], num_gpus: int
) -> tuple[Service, ...]:
    deployment = config.disaggregated
    services = []
    if isinstance(deployment.store, MooncakeStore):
        master = deployment.store.master
        services.append(
            Service("store", 0, master, (), ("mooncake_master", *master_of(deployment.store, 0).arguments()))
        )
    first, each = deployment.trainer.nproc_per_node, config.engine.tp_size
    needed = first + deployment.num_servers * each
    if deployment.managed and device == "cuda" and num_gpus and needed > num_gpus:
        raise ValueError(
            f"this machine has {num_gpus} GPUs; required: {needed}, for {first} ranks of "
            f"deployment.trainer.nproc_per_node and {deployment.num_servers} servers of engine.tp_size {each}"
        )
    for index in range(deployment.num_servers):
        host, port = server_address(deployment, index)
        start = first + index * each
        gpus = tuple(range(start, start + each)) if deployment.managed and device == "cuda" else ()
        command = server_command(config, target, device, index, port)
        services.append(Service("server", index, f"{host}:{port}", gpus, command))
    producer = (sys.executable, "-m", "specforge_launch.roles", "producer")
    return (*services, Service("producer", 0, "", (), producer))
