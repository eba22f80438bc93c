"""What is recorded beside `metrics.jsonl`, which every run writes."""

from typing import Literal

from specforge_config.base import Config


class TrackingConfig(Config):
    """Trackers and audits."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Services that metrics are sent to as well."""
    samples: bool = False
    """Whether each rank appends the samples of every step to `samples.rank<r>.jsonl`, for audits of what was
    trained on."""
