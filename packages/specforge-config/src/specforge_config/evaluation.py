"""Measuring the draft by real speculative decoding against its target."""

from pydantic import NonNegativeInt, PositiveInt, field_validator

from specforge_config.base import Config, InputPath


class EvaluationConfig(Config):
    """Held-out prompts and how they are decoded. Decoding is greedy; its outputs are compared with the target's own."""

    prompts: tuple[InputPath, ...] = ()
    """JSONL or Parquet files of prompts that are not trained on; none: nothing is evaluated."""
    max_prompts: PositiveInt | None = None
    """Prompts taken from the start of each file; default: all."""
    max_new_tokens: PositiveInt = 128
    """Tokens generated for each prompt, unless the target ends its answer earlier."""
    interval: NonNegativeInt = 0
    """Optimizer steps between evaluations while training; 0 evaluates only before and after."""
    interval_prompts: PositiveInt = 8
    """Prompts of an evaluation while training."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
