"""One run: the whole configuration, and the checks that cross its sections."""

from pydantic import Field, model_validator

from specforge_config.base import Config
from specforge_config.data import DataConfig
from specforge_config.deployment import DeploymentConfig, LocalColocated
from specforge_config.draft import DraftConfig, DSparkConfig
from specforge_config.engine import EngineConfig
from specforge_config.evaluation import EvaluationConfig
from specforge_config.optim import OptimizerConfig, ScheduleConfig
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

    @model_validator(mode="after")
    def _sections_agree(self) -> "RunConfig":
        _ = self.topology, self.batches
        if self.target.backend == "hf" and self.engine.tp_size > 1:
            raise ValueError(
                f"engine.tp_size is {self.engine.tp_size}, but target.backend hf holds a whole copy of the target on each "
                "rank: set engine.tp_size to 1 or target.backend to sglang"
            )
        return self

    @property
    def folder(self) -> str:
        """The output folder."""
        return self.output_dir or f"outputs/{self.name}"

    @property
    def prompt_seed(self) -> int:
        """Seed of the order of prompts."""
        return self.seed if self.data.prompt_seed is None else self.data.prompt_seed

    @property
    def topology(self) -> Topology:
        """Islands and replicas of the trainer's world."""
        return Topology(self.deployment.trainer.world_size, self.engine.tp_size)

    @property
    def batches(self) -> BatchPlan:
        """Batch a rank, micro-batch and accumulation."""
        return resolve_batches(self.topology.world_size, self.training.batch_size, self.training.global_batch_size)
