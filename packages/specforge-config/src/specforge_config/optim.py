"""The optimizer and the learning-rate schedule."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt

from specforge_config.base import Config


class OptimizerConfig(Config):
    """AdamW over float32 master weights (arXiv 1711.05101)."""

    lr: float = Field(6e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments, each in [0, 1)."""
    eps: float = Field(1e-8, gt=0)
    """Denominator's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay on matrices; norms and biases have none."""
    clip: float | None = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down; None never scales."""

    def _faults(self) -> Iterator[str]:
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas is {list(self.betas)}; required: two numbers in [0, 1)"


class ScheduleConfig(Config):
    """Learning rate over the run: linear warm-up to the peak, then the chosen shape down to `min_ratio` of
    it."""

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Shape after warm-up; `wsd` (warm-up, stable, decay; arXiv 2404.06395) stays at the peak until the last
    `decay_ratio` of the run."""
    warmup_steps: NonNegativeInt | None = None
    """Steps of warm-up; excludes `warmup_ratio`."""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """Warm-up as a share of all steps; excludes `warmup_steps`."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak; `constant` ignores it."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """Share of all steps over which `wsd` decays."""

    def _faults(self) -> Iterator[str]:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            yield "warmup_steps and warmup_ratio are both set; required: at most one of the two"
        if self.kind == "wsd" and (self.warmup_ratio or 0) + self.decay_ratio > 1:
            yield (
                f"warmup_ratio {self.warmup_ratio} and decay_ratio {self.decay_ratio} exceed the whole run; "
                "required: a sum of at most 1"
            )
