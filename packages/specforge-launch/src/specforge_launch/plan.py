"""RunConfig -> RunPlan: every decision of a launch, made before anything starts.

Invariant: the plan is a pure function of the configuration, the files it names and the machine it is made on.
It loads no torch and starts nothing; `run` carries out exactly what `plan` shows.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from specforge_capture.sglang.engine_args import resolve_engine_arguments
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, read_target_shape
from specforge_config.unbuilt import not_implemented
from specforge_launch.machine import gpu_memory, main_memory
from specforge_launch.memory import MemoryPlan, predict, require_room_to_measure
from specforge_launch.nodes import NodePlan, plan_nodes
from specforge_launch.run_folder import RunFolder
from specforge_launch.services import CapturePlan, plan_capture


@dataclass(frozen=True)
class Process:
    """One rank."""

    role: str
    node: int
    rank: int
    local_rank: int
    device: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks' agents find each other."""

    backend: str
    """`c10d` with a free port on one node, `static` on several."""
    endpoint: str
    """host:port; port 0 takes a free one."""
    run_id: str


@dataclass(frozen=True)
class Steps:
    """The length of the run."""

    rows: int
    """Rows of the training files. Preparing prompts drops unusable ones, which shortens the run."""
    steps_per_epoch: int
    total_steps: int
    samples_per_rank: int
    micro_batch: int
    accumulation: int
    global_batch_size: int
    group_by_length: int
    """Steps among which samples are dealt by length; 0: in random order."""


@dataclass(frozen=True)
class RunPlan:
    """What a launch will do."""

    name: str
    mode: str
    world_size: int
    tp_size: int
    islands: tuple[tuple[int, ...], ...]
    """Global ranks of each island."""
    mesh: tuple[int, int]
    """(replicas, shards) of the draft."""
    processes: tuple[Process, ...]
    """The ranks."""
    threads_per_rank: int
    """Threads that a rank computes with on the host."""
    rendezvous: Rendezvous
    engine_args: dict[str, object]
    memory: MemoryPlan
    steps: Steps
    outputs: dict[str, str]
    """What the run makes -> where it lies."""
    nodes: tuple[NodePlan, ...]
    """What is typed on each machine."""
    capture: CapturePlan | None = None
    """How features come to the ranks of a disaggregated run; None where ranks capture themselves."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What ranks and capture servers compute on."""
        return "cpu" if self.processes[0].device == "cpu" else "cuda"

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.steps.total_steps

    def to_json(self) -> dict[str, object]:
        """The plan as plain values; `steps` is spread over the top level."""
        plain = asdict(self)
        steps = plain.pop("steps")
        capture = self.capture and {
            **plain["capture"],
            "window_bytes": self.capture.window_bytes,
            "server_memory": self.capture.server_memory.to_json(),
        }
        return {**plain, "memory": self.memory.to_json(), "capture": capture, **steps}


def outputs_of(config: RunConfig) -> dict[str, str]:
    """Where the parts of a run lie under its output folder."""
    folder = RunFolder(config.folder)
    paths = {
        "checkpoints": folder.checkpoints,
        "export": folder.export,
        "metrics": folder.metrics,
        "summary": folder.summary,
        "report": folder.report,
        "configuration": folder.resolved,
        "logs": folder.logs,
    }
    if config.dummy_weights:
        del paths["export"]
    return {name: str(path) for name, path in paths.items()}


def make_plan(config: RunConfig, source: str = "RECIPE") -> RunPlan:
    """Plan a run.

    Args:
        config: the run.
        source: recipe and overrides as they are typed, for the commands of each node.

    Raises:
        ValueError: for settings that nothing carries out yet, for files that are missing or unreadable, for
            a run shorter than one optimizer step, and for one that does not fit its store or its GPUs.
    """
    if refused := not_implemented(config):
        raise ValueError("\n".join(refused))
    trainer, topology = config.deployment.trainer, config.topology
    target = read_target_shape(config.target.path)
    gpus = gpu_memory() if trainer.device != "cpu" else []
    on_gpu = trainer.device == "cuda" or bool(gpus)
    each = min(gpus) if gpus else None if on_gpu else main_memory()
    capacity = each if on_gpu or each is None else each // trainer.nproc_per_node
    port = Rendezvous("c10d", "127.0.0.1:0", trainer.run_id)
    if trainer.nnodes > 1:
        port = Rendezvous("static", str(trainer.rendezvous), trainer.run_id)
    memory = predict(config, target, on_gpu=on_gpu, capacity=capacity)
    capture = None
    if config.deployment.mode == "disaggregated":
        require_room_to_measure(config, target, memory)
        capture = plan_capture(config, target, "cuda" if on_gpu else "cpu", len(gpus), each)
    return RunPlan(
        name=config.name,
        mode=config.deployment.mode,
        world_size=topology.world_size,
        tp_size=topology.tp_size,
        islands=tuple(tuple(island) for island in topology.islands),
        mesh=topology.mesh_shape(config.training.sharding),
        processes=tuple(_process(config, rank, on_gpu) for rank in range(topology.world_size)),
        threads_per_rank=trainer.threads(on_gpu=on_gpu),
        rendezvous=port,
        engine_args=_engine_args(config, target, on_gpu=on_gpu),
        memory=memory,
        steps=_steps(config),
        outputs=outputs_of(config),
        nodes=plan_nodes(config, source),
        capture=capture,
    )


def agent_arguments(plan: RunPlan, node: int) -> list[str]:
    """torchrun's arguments for the ranks of one node, up to what the ranks run."""
    local = [process for process in plan.processes if process.node == node]
    meeting = plan.rendezvous
    arguments = {
        "nnodes": len({process.node for process in plan.processes}),
        "nproc-per-node": len(local),
        "node-rank": node,
        "rdzv-backend": meeting.backend,
        "rdzv-endpoint": meeting.endpoint,
        "rdzv-id": meeting.run_id,
        "max-restarts": 0,
        "monitor-interval": 0.1,
    }
    if meeting.backend == "c10d":
        arguments["local-addr"] = "127.0.0.1"
    else:
        arguments["master-addr"], arguments["master-port"] = meeting.endpoint.rsplit(":", 1)
    return [f"--{name}={value}" for name, value in arguments.items()]


def _process(config: RunConfig, rank: int, on_gpu: bool) -> Process:
    node, local = divmod(rank, config.deployment.trainer.nproc_per_node)
    command = (
        sys.executable,
        "-m",
        "specforge_launch.worker",
        str(RunFolder(config.folder).launch(f"node{node}")),
    )
    return Process("trainer", node, rank, local, f"cuda:{local}" if on_gpu else "cpu", command)


def _engine_args(config: RunConfig, target: TargetShape, *, on_gpu: bool) -> dict[str, object]:
    if config.target.backend == "sglang":
        return {**resolve_engine_arguments(config, target, "cuda" if on_gpu else "cpu").keywords()}
    engine = {
        "backend": "hf",
        "load_format": config.engine.load_format,
        "dtype": config.target.element_type(target),
        "attention": "sdpa",
    }
    if config.deployment.mode == "disaggregated":  # its server captures one prompt at a time
        return engine
    return {**engine, "packed": True, "max_batch_tokens": config.batches.batch_size * config.data.max_length}


def _steps(config: RunConfig) -> Steps:
    batches = config.batches
    rows = sum(map(count_rows, config.data.train))
    each = rows // batches.global_batch_size
    if each == 0:
        raise ValueError(
            f"data.train has {rows} rows, required at least one optimizer step of "
            f"training.global_batch_size={batches.global_batch_size} samples"
        )
    total = each * config.training.epochs
    return Steps(
        rows=rows,
        steps_per_epoch=each,
        total_steps=min(total, config.training.max_steps or total),
        samples_per_rank=batches.batch_size,
        micro_batch=batches.micro_batch,
        accumulation=batches.accumulation,
        global_batch_size=batches.global_batch_size,
        group_by_length=config.data.group_by_length,
    )


def count_rows(path: str) -> int:
    """Rows of a JSONL or Parquet file.

    Raises:
        ValueError: if there is no such file.
    """
    if not Path(path).is_file():
        raise ValueError(f"data.train: no file {path}")
    if path.endswith(".parquet"):
        from pyarrow.parquet import read_metadata

        return read_metadata(path).num_rows
    with open(path, "rb") as file:
        return sum(1 for line in file if not line.isspace())
