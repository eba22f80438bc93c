"""The engine's arguments, resolved once from a run: keywords in process and a server's command line are two
views.

Invariant of capture: one prefill takes whole rows of up to `data.max_length` tokens, and SGLang never cuts,
reorders or reuses them: no chunked prefill, no prefix cache, no overlap, no CUDA graph. In process a prefill
is a whole island batch, `tp_size * batch_size` rows; a capture server prefills what has arrived. Where SGLang
answers prompts instead, chunked prefill, prefix cache, overlap and CUDA graphs are as SGLang sets them.

Pure: imports neither SGLang nor torch.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specforge_config.deployment import Disaggregated
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape

CONTEXT_HEADROOM = 7
"""Slots of a request's context that SGLang 0.5 keeps for itself."""

_PAGE = 128
"""The largest page among SGLang's attention backends; a request's last page is its own."""

_OTHER_ENGINES = (
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_dp_lm_head",
    "moe_a2a_backend",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "pp_size",
    "speculative_algorithm",
    "host",
    "port",
)
"""Arguments under which a rank would see less than the whole batch, or whose ranks or address are not the
recipe's to place."""

Value = str | int | float | bool


@dataclass(frozen=True)
class EngineArguments:
    """Arguments by SGLang's own names."""

    values: dict[str, Value]

    def keywords(self) -> dict[str, Value]:
        """Keywords of `ServerArgs`."""
        return dict(self.values)

    def command_line(self) -> list[str]:
        """Arguments of `python -m sglang.launch_server`; a switch that is off is left out."""
        line = []
        for name, value in self.values.items():
            flag = f"--{name.replace('_', '-')}"
            if value is True:
                line.append(flag)
            elif value is not False:
                line += [flag, str(value)]
        return line


def resolve_engine_arguments(
    config: RunConfig, target: TargetShape, device: Literal["cpu", "cuda"]
) -> EngineArguments:
    """Settle the engine's arguments for a run.

    Args:
        config: the run.
        target: the target's shape, as `read_target_shape(config.target.path)` reads it.
        device: where ranks compute.

    Raises:
        ValueError: a line for each setting that the engine cannot serve one island batch with.
    """
    engine, longest = config.engine, config.data.max_length
    requests, served = engine.tp_size * config.batches.batch_size, False
    if isinstance(config.deployment, Disaggregated):
        requests, served = engine.max_running_requests or config.deployment.producer.in_flight, True
    context = engine.context_length or _default_context(config, target)
    values = {
        **_common(config, target, device, context),
        "max_running_requests": engine.max_running_requests or requests,
        "max_total_tokens": engine.max_total_tokens or _pool(requests, longest, context),
        "chunked_prefill_size": -1,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "sampling_backend": "pytorch",
        "random_seed": config.seed,
    }
    if engine.tp_size > 1 and not served:
        # SGLang's own all-reduce maps peers' memory, which the trainer's NCCL shares a device with.
        values["disable_custom_all_reduce"] = True
    faults = [*_faults(config, target, context), *_extra_faults(config, values, "capture")]
    if not served:
        faults += _island_faults(config, requests)
    if faults:
        raise ValueError("\n".join(faults))
    return EngineArguments(values | config.engine.extra)


def resolve_answering_arguments(
    config: RunConfig, target: TargetShape, device: Literal["cpu", "cuda"]
) -> EngineArguments:
    """Settle the arguments of a server that answers the prompts of `regeneration`.

    Args:
        config: the run.
        target: the target's shape.
        device: where it computes.

    Raises:
        ValueError: a line for each setting that the engine cannot serve with.
    """
    engine, slots = config.engine, config.regeneration.batch_size
    context = engine.context_length or config.data.max_length + CONTEXT_HEADROOM
    values = {
        **_common(config, target, device, context),
        "max_running_requests": engine.max_running_requests or slots,
        "random_seed": config.regeneration.seed,
    }
    if device == "cpu":
        values |= {
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "sampling_backend": "pytorch",
        }
        values["max_total_tokens"] = _pool(slots, config.data.max_length, context)
    if engine.max_total_tokens is not None:
        values["max_total_tokens"] = engine.max_total_tokens
    if faults := [*_faults(config, target, context), *_extra_faults(config, values, "regeneration")]:
        raise ValueError("\n".join(faults))
    return EngineArguments(values | engine.extra)


def _common(
    config: RunConfig, target: TargetShape, device: Literal["cpu", "cuda"], context: int
) -> dict[str, Value]:
    """What does not depend on the engine's task."""
    engine = config.engine
    values: dict[str, Value] = {
        "model_path": config.target.path,
        "device": device,
        "dtype": config.target.element_type(target),
        "load_format": engine.load_format,
        "tp_size": engine.tp_size,
        "ep_size": engine.ep_size,
        "context_length": context,
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
    }
    optional = {
        "attention_backend": engine.attention_backend or ("torch_native" if device == "cpu" else None),
        "moe_runner_backend": engine.moe_runner_backend,
        # SGLang asks for the share on a CPU, where it bounds nothing: the pool has max_total_tokens.
        "mem_fraction_static": engine.mem_fraction_static or (0.5 if device == "cpu" else None),
    }
    return values | {name: value for name, value in optional.items() if value is not None}


def _pool(requests: int, longest: int, context: int) -> int:
    """Tokens of a pool that holds so many of the longest rows."""
    return max(requests * _pages(longest + CONTEXT_HEADROOM), _pages(context))


def engine_environment(device: Literal["cpu", "cuda"], tp_size: int) -> dict[str, str]:
    """What SGLang reads from the environment when it starts; what is set there already is kept."""
    if device == "cuda":
        return {}
    # SGLang wants each rank's cores named; where ranks run is not ours to say, so all get the same.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    binding = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * tp_size))
    return {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": binding}


def _pages(tokens: int) -> int:
    return -(-tokens // _PAGE) * _PAGE


def _default_context(config: RunConfig, target: TargetShape) -> int:
    """Room for the longest row and, in process, behind a prompt as long for an evaluated answer, as far as
    positions reach."""
    longest = config.data.max_length + CONTEXT_HEADROOM
    answer = 0
    if config.evaluation.prompts and config.deployment.mode == "local_colocated":
        answer = config.evaluation.max_new_tokens + getattr(config.draft, "block_size", 0) + 1
    return max(longest, min(longest + answer, target.max_positions))


def _faults(config: RunConfig, target: TargetShape, context: int) -> Iterator[str]:
    engine, longest = config.engine, config.data.max_length
    if context < longest + CONTEXT_HEADROOM:
        yield (
            f"engine.context_length is {context}; required: at least {longest + CONTEXT_HEADROOM}, as SGLang "
            f"keeps {CONTEXT_HEADROOM} slots above data.max_length, {longest}"
        )
    if engine.context_length is None and context > target.max_positions:
        yield (
            f"data.max_length is {longest}; required: at most {target.max_positions - CONTEXT_HEADROOM}, as "
            f"the target has {target.max_positions} positions of which SGLang keeps {CONTEXT_HEADROOM}; or "
            "set engine.context_length, if the target reaches further than its max_position_embeddings"
        )
    if engine.dp_size != 1:
        yield (
            f"engine.dp_size is {engine.dp_size}; required: 1, as islands and servers are the data "
            "parallelism of a run, and a rank of a data-parallel engine would see a part of a batch"
        )


def _island_faults(config: RunConfig, requests: int) -> Iterator[str]:
    """An engine in process takes a whole island batch of `requests` rows at once."""
    engine, longest = config.engine, config.data.max_length
    batch = f"tp_size {engine.tp_size} * batch_size {config.batches.batch_size}"
    if engine.max_running_requests is not None and engine.max_running_requests < requests:
        yield (
            f"engine.max_running_requests is {engine.max_running_requests}; required: at least "
            f"{requests}, the rows of one island batch, {batch}"
        )
    tokens = requests * longest
    if engine.max_total_tokens is not None and engine.max_total_tokens < tokens:
        yield (
            f"engine.max_total_tokens is {engine.max_total_tokens}; required: at least {tokens}, the tokens "
            f"of one island batch, {batch} * data.max_length {longest}; or lower training.batch_size"
        )


def _extra_faults(config: RunConfig, values: dict[str, Value], task: str) -> Iterator[str]:
    for name in sorted(config.engine.extra):
        if name in values:
            yield f"engine.extra.{name} is set; required: drop it, {task} needs {name}={values[name]!r}"
        elif name in _OTHER_ENGINES:
            yield (
                f"engine.extra.{name} is set; required: drop it, {task} needs an engine over tp_size ranks "
                "at an address of its own"
            )
