"""The SGLang engine's fields, of which a command line and in-process keywords are two views. One model for
both."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, PositiveInt

from specforge_config.base import Config


class EngineConfig(Config):
    """How the target's engine runs; read by the `sglang` backend and by capture servers, `tp_size` by every
    run."""

    tp_size: PositiveInt = 1
    """Ranks that share one copy of the target: the width of an island."""
    dp_size: PositiveInt = 1
    """Data parallelism inside the engine."""
    ep_size: PositiveInt = 1
    """Expert parallelism inside the engine."""
    context_length: PositiveInt | None = None
    """Longest request in tokens; default: `data.max_length` and the engine's headroom."""
    mem_fraction_static: float | None = Field(None, gt=0, lt=1)
    """Share of device memory for the target's weights and token pool."""
    max_total_tokens: PositiveInt | None = None
    """Tokens of the pool; default: what one island batch needs, or the engine's choice where it answers
    prompts."""
    max_running_requests: PositiveInt | None = None
    """Requests of one prefill; default: what one island batch needs."""
    attention_backend: str | None = None
    """Attention backend; default: the engine's own choice."""
    moe_runner_backend: str | None = None
    """Mixture-of-experts backend; default: the engine's own choice."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` gives the target random weights at its real shapes, of either backend: `target.path` then needs
    `config.json` alone, every output says so, and no draft is exported."""
    extra: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Further engine arguments by their own names."""

    def _faults(self) -> Iterator[str]:
        for name in ("dp_size", "ep_size"):
            if self.tp_size % getattr(self, name):
                yield (
                    f"{name} is {getattr(self, name)}, tp_size is {self.tp_size}; "
                    f"required: a {name} that divides tp_size, whose ranks it regroups"
                )
        if self.context_length and self.max_total_tokens and self.max_total_tokens < self.context_length:
            yield (
                f"max_total_tokens is {self.max_total_tokens}; required: at least context_length, "
                f"{self.context_length}, so that one request fits"
            )
        for name in sorted(self.extra.keys() & type(self).model_fields.keys()):
            yield f"extra.{name} is set; required: engine.{name}, which is a setting of its own"
