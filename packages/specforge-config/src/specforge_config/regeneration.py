"""Answering prompts with the target, so that a draft trains on what its target really writes."""

from collections.abc import Iterator

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from specforge_config.base import Config, InputPaths, refused_addresses, repeated


class RegenerationConfig(Config):
    """What `specforge-capture regenerate` answers and how. The length limit of a whole conversation is
    `data.max_length`, as in training."""

    prompts: InputPaths = ()
    """JSONL or Parquet files of `turns` (user turns alone), `messages` or ShareGPT `conversations`; answers
    that they hold are replaced."""
    max_prompts: PositiveInt | None = None
    """Rows taken from the start of each file; default: all."""
    output: str | None = None
    """JSONL file to write, relative to the working directory; default: `answers.jsonl` in the run's output
    folder. Name it in `data.train` to train on it."""
    max_new_tokens: PositiveInt = 1024
    """Longest answer in tokens. A conversation ends with an answer that is cut there, and its row says so."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sampled from the fewest tokens that hold this share of the probability."""
    seed: NonNegativeInt = 0
    """Seed of the sampling. Each answer has draws of its own, whatever is decoded beside it; SGLang
    heeds them under `--enable-deterministic-inference` alone, which `engine.extra` gives to servers that are
    started for it."""
    batch_size: PositiveInt = 64
    """Sequences decoded at once, for which the device must hold keys and values; of `sglang`, on each
    server."""
    servers: tuple[str, ...] = ()
    """`host:port` of SGLang servers of the target that run already; default: with `target.backend: sglang`,
    servers of `engine.tp_size` GPUs each are started on all GPUs of this machine, and ended afterwards."""
    startup_seconds: PositiveFloat = 1800.0
    """How long such a server may take to load the target."""
    answer_seconds: PositiveFloat = 1800.0
    """How long a server may take to give one answer, those before it in its queue included."""

    def _faults(self) -> Iterator[str]:
        for path in repeated(self.prompts):
            yield f"prompts lists {path} twice; required: each file once"
        for error in refused_addresses(self.servers):
            yield f"servers: {error}"
        for address in repeated(self.servers):
            yield f"servers lists {address} twice; required: each server once"
        if self.top_p < 1 and self.temperature == 0:
            yield f"top_p is {self.top_p}, but temperature 0 is greedy; required: a temperature, or top_p 1"
