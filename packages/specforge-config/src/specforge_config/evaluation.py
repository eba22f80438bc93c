"""Measuring the draft by real speculative decoding against its target."""

from collections.abc import Iterator

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from specforge_config.base import Config, InputPaths, repeated


class EvaluationConfig(Config):
    """Held-out prompts and how they are decoded.

    A run decodes greedily and compares every output with the target's own; `specforge-launch evaluate` goes
    through all `temperatures`.
    """

    prompts: InputPaths = ()
    """JSONL or Parquet files of prompts that are not trained on; none: nothing is evaluated."""
    max_prompts: PositiveInt | None = None
    """Prompts taken from the start of each file; default: all."""
    max_new_tokens: PositiveInt = 128
    """Tokens generated for each prompt, unless the target ends its answer earlier."""
    temperatures: tuple[NonNegativeFloat, ...] = Field((0.0, 1.0), min_length=1)
    """Sampling temperatures of `specforge-launch evaluate`; 0 is greedy."""
    seed: NonNegativeInt = 0
    """Seed of sampled decoding."""
    interval: NonNegativeInt = 0
    """Optimizer steps between evaluations while training; 0 evaluates only before and after."""
    interval_prompts: PositiveInt = 8
    """Prompts of an evaluation while training."""

    def _faults(self) -> Iterator[str]:
        for path in repeated(self.prompts):
            yield f"prompts lists {path} twice; required: each file once"
        if self.interval and not self.prompts:
            yield f"interval is {self.interval}, but prompts is empty; required: prompts, or interval 0"
