"""One run: the whole configuration, and the checks that cross its sections."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from specforge_config.base import Config, unlike_default
from specforge_config.data import DataConfig
from specforge_config.deployment import DeploymentConfig, Disaggregated, LocalColocated
from specforge_config.draft import DraftConfig, DSparkConfig
from specforge_config.engine import EngineConfig
from specforge_config.evaluation import EvaluationConfig
from specforge_config.optim import OptimizerConfig, ScheduleConfig
from specforge_config.regeneration import RegenerationConfig
from specforge_config.target import TargetConfig
from specforge_config.topology import BatchPlan, Topology, resolve_batches
from specforge_config.tracking import TrackingConfig
from specforge_config.training import TrainingConfig


class RunConfig(Config):
    """A run of draft-model training, from prompts to an exported draft."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; the default output folder is `outputs/<name>`."""
    output_dir: str | None = None
    """Where everything that the run makes lies, relative to the working directory."""
    seed: int = Field(42, ge=0)
    """Seed of the draft's initial weights and of the anchors."""
    target: TargetConfig
    """The frozen target."""
    draft: DraftConfig = DSparkConfig()
    """The draft to train."""
    data: DataConfig
    """The prompts to train on."""
    regeneration: RegenerationConfig = RegenerationConfig()
    """Answers of the target to prompts, made before the run."""
    engine: EngineConfig = EngineConfig()
    """The target's engine."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over the run."""
    training: TrainingConfig = TrainingConfig()
    """The training loop."""
    deployment: DeploymentConfig = LocalColocated()
    """Where processes stand."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Speculative decoding on held-out prompts."""
    tracking: TrackingConfig = TrackingConfig()
    """Records."""

    @property
    def folder(self) -> str:
        """The output folder."""
        return self.output_dir or f"outputs/{self.name}"

    @property
    def prompt_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.seed if self.data.prompt_seed is None else self.data.prompt_seed

    @property
    def dummy_weights(self) -> bool:
        """Whether the target's weights are random: speed and memory are then real, what is learnt is not."""
        return self.engine.load_format == "dummy"

    @property
    def topology(self) -> Topology:
        """Islands and replicas of the trainer's world; ranks that hold no target are islands of their own."""
        tp_size = self.engine.tp_size if self.deployment.mode == "local_colocated" else 1
        return Topology(self.deployment.trainer.world_size, tp_size)

    @property
    def batches(self) -> BatchPlan:
        """Batch a rank, micro-batch and accumulation."""
        return resolve_batches(
            self.topology.world_size, self.training.batch_size, self.training.global_batch_size
        )

    def _faults(self) -> Iterator[str]:
        try:
            _ = self.topology, self.batches
        except ValueError as error:
            yield str(error)
        else:
            yield from self._disaggregated_faults()
        yield from self._engine_faults()
        yield from self._length_faults()
        yield from self._schedule_faults()
        held_out = {Path(path).resolve() for path in self.evaluation.prompts}
        trained = {"data.train": self.data.train, "regeneration.prompts": self.regeneration.prompts}
        for name, paths in trained.items():
            for path in (path for path in paths if Path(path).resolve() in held_out):
                yield f"evaluation.prompts holds {path}, as does {name}; required: held-out prompts"

    def _engine_faults(self) -> Iterator[str]:
        """The `hf` backend takes no engine settings but `load_format`, least of all a tensor parallelism
        that it would ignore."""
        if self.target.backend != "hf":
            return
        if self.regeneration.servers:
            yield (
                "regeneration.servers is set, but target.backend hf answers prompts in its own process; "
                "required: drop regeneration.servers, or target.backend sglang"
            )
        for name in unlike_default(self.engine):
            if name == "tp_size":
                holder = "rank" if self.deployment.mode == "local_colocated" else "capture server"
                yield (
                    f"engine.tp_size is {self.engine.tp_size}, but target.backend hf holds a whole target on "
                    f"each {holder}; required: engine.tp_size 1 or target.backend sglang"
                )
            elif name != "load_format":
                yield (
                    f"engine.{name} is set, but target.backend hf has no engine; "
                    f"required: drop engine.{name}, or target.backend sglang"
                )

    @property
    def disaggregated(self) -> Disaggregated:
        """`deployment`, of a run that is known to be disaggregated."""
        assert isinstance(self.deployment, Disaggregated), f"deployment.mode is {self.deployment.mode}"
        return self.deployment

    def _disaggregated_faults(self) -> Iterator[str]:
        """Whole optimizer windows must fit between the producer's marks and into the store; ranks hold no
        target while they train."""
        deployment = self.deployment
        if not isinstance(deployment, Disaggregated):
            return
        if self.evaluation.interval:
            yield (
                f"evaluation.interval is {self.evaluation.interval}, but the ranks of a disaggregated run "
                "hold no target while they train; required: 0, which evaluates before and after"
            )
        try:
            deployment.producer.watermarks(self.batches.global_batch_size)
        except ValueError as error:
            yield from str(error).splitlines()
        high, capacity = deployment.producer.high_bytes, deployment.store_bytes
        if high is not None and capacity is not None and capacity < high:
            yield (
                f"deployment.producer.high_bytes is {high}; required: at most {capacity}, what "
                "deployment.store.capacity_bytes gives over all servers"
            )

    def _length_faults(self) -> Iterator[str]:
        """Rows of `data.max_length` tokens must fit the engine and the exported draft."""
        longest = self.data.max_length
        limits = {
            "engine.context_length": self.engine.context_length,
            "engine.max_total_tokens": self.engine.max_total_tokens,
            "draft.max_positions": self.draft.max_positions,
        }
        for name, limit in limits.items():
            if limit is not None and limit < longest:
                yield f"{name} is {limit}; required: at least data.max_length, {longest}"

    def _schedule_faults(self) -> Iterator[str]:
        steps, warmup = self.training.max_steps, self.schedule.warmup_steps
        if steps is None or warmup is None:
            return
        decay = self.schedule.decay_ratio * steps if self.schedule.kind == "wsd" else 0
        if warmup > steps:
            yield f"schedule.warmup_steps is {warmup}; required: at most training.max_steps, {steps}"
        elif warmup + decay > steps:
            yield (
                f"schedule.warmup_steps {warmup} and the decay over schedule.decay_ratio "
                f"{self.schedule.decay_ratio} exceed training.max_steps, {steps}; required: less of one"
            )
