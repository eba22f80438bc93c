"""Prompts: where they lie, how they are rendered and which of their tokens are supervised."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from specforge_config.base import Config, InputPath


class DataConfig(Config):
    """The training prompts."""

    train: tuple[InputPath, ...]
    """JSONL or Parquet files; one path or a list."""
    format: Literal["auto", "messages", "sharegpt", "text", "tokens"] = "auto"
    """Row form: OpenAI `messages`, ShareGPT `conversations`, plain `text`, or pre-tokenised `input_ids` with `loss_mask`; `auto` reads it off each file's first row."""
    max_length: PositiveInt = 4096
    """Longest row in tokens."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to longer rows."""
    supervise: Literal["all_turns", "last_turn"] = "all_turns"
    """Which assistant turns are supervised."""
    thinking: Literal["keep", "drop"] = "keep"
    """Whether the reasoning part of supervised turns is supervised."""
    enable_thinking: bool | None = None
    """Passed to the chat template where set."""
    chat_template: InputPath | None = None
    """Jinja file that replaces the tokenizer's chat template."""
    strict: bool = False
    """Whether a row that cannot be used is an error; otherwise it is dropped and reported."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Checksum of the single training file, verified before anything starts."""
    prompt_seed: int | None = None
    """Seed of the order of prompts; default: the run's seed."""
    cache_dir: str = ".cache/specforge/prompts"
    """Where rendered prompts are kept, relative to the working directory."""

    @field_validator("train", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value
