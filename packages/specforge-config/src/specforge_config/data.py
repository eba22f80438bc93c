"""Prompts: where they lie, how they are rendered and which of their tokens are supervised."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from specforge_config.base import Config, InputPath, InputPaths, repeated, unlike_default


class DataConfig(Config):
    """The training prompts."""

    train: InputPaths
    """JSONL or Parquet files; one path or a list."""
    format: Literal["auto", "messages", "sharegpt", "turns", "text", "tokens"] = "auto"
    """Row form: OpenAI `messages`, ShareGPT `conversations`, user `turns` without answers (to be answered
    first), plain `text`, or pre-tokenised `input_ids` with `loss_mask`; `auto` reads it off each file's first
    row."""
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
    prompt_seed: int | None = Field(None, ge=0)
    """Seed of the order of prompts; default: the run's seed."""
    group_by_length: NonNegativeInt = 0
    """Optimizer steps among which samples are dealt by length, such as 50: the ranks of a step then get rows
    of similar lengths, and wait less for each other. 0 keeps the order random throughout."""
    cache_dir: str = ".cache/specforge/prompts"
    """Where rendered prompts are kept, relative to the working directory."""

    def _faults(self) -> Iterator[str]:
        if not self.train:
            yield "train is empty; required: at least one file"
        for path in repeated(self.train):
            yield f"train lists {path} twice; required: each file once"
        if self.sha256 is not None and len(self.train) != 1:
            yield f"sha256 is set with {len(self.train)} files in train; required: one file"
        if self.format in ("text", "tokens"):
            chat_only = {"supervise", "thinking", "enable_thinking", "chat_template"}
            for name in sorted(chat_only & set(unlike_default(self))):
                yield f"{name} is set, but rows of format {self.format} have no chat; required: drop one"
