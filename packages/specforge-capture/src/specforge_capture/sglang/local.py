"""The `sglang` target: the engine of an island, in the trainer's own process.

All ranks of an island capture the island's rows together, by tensor parallelism. Each sees all states and
keeps those of its own rows. Decoding, for evaluation, runs in the same engine.

Decoding keeps no keys and values between steps: a step is one prefill of the whole sequence, with logits for
its new tokens. That is right for every attention (a recurrent state cannot be cropped), and up to some
hundred tokens a prefill takes no longer than a decoding step outside of a CUDA graph.

Notation: T packed tokens, K captured layers, H hidden size, V vocabulary, n new tokens of one sequence.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_capture.sglang.engine_args import engine_environment, resolve_engine_arguments
from specforge_capture.sglang.islands import Place
from specforge_capture.sglang.versions import load_adapter
from specforge_capture.startup import Startup
from specforge_capture.targets.base import ALL, Extension, PromptRow, feature_batch, token_range
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape


class SGLangTarget:
    """This rank's share of its island's target.

    Making one is a collective of the whole world, whose default process group must be initialised. One engine
    lives in a process.

    Args:
        config: the run.
        shape: the target's shape, as `read_target_shape(config.target.path)` reads it.
        spec: the capture contract.
        device: where this rank computes.
        stop_ids: tokens that end an answer.

    Raises:
        ValueError: for settings under which the engine cannot capture an island batch, an unsupported SGLang,
            or a model whose states cannot be captured.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: TargetShape,
        spec: CaptureSpec,
        device: torch.device,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self.stop_ids = tuple(stop_ids)
        self.device = device
        kind = "cuda" if device.type == "cuda" else "cpu"
        keywords: dict[str, Any] = resolve_engine_arguments(config, shape, kind).keywords()
        self._place = Place.of_rank(config.engine.tp_size, device.index or 0)
        self.startup = Startup()
        with _sglang_environment(device, config.engine.tp_size):
            with self.startup.part("import"):
                adapter = load_adapter()
                from specforge_capture.sglang.engine import Engine
                from specforge_capture.sglang.states import StateReader

            self._engine = Engine(adapter, keywords, self._place, self.startup)
        self._states = StateReader(self._engine.model, spec.layer_ids, shape.num_layers, spec.hidden_size)
        self._most_tokens, self._most_rows = keywords["context_length"], keywords["max_running_requests"]
        self._leading = False

    @torch.no_grad()
    def capture(self, rows: Sequence[PromptRow], own: slice = ALL) -> FeatureBatch:
        """Capture the states of an island's rows, packed in their order, and keep those of `rows[own]`. A
        collective of the island.

        `no_grad` rather than inference mode: the trainer's autograd saves these states.

        Raises:
            ValueError: for an empty batch or row, more rows or tokens than the engine holds, or a partial
                capture.
        """
        names = tuple(row.sample_id for row in rows)
        self._require_room([len(row.input_ids) for row in rows], f"the rows {', '.join(names)}")
        self._engine.prefill([row.input_ids.tolist() for row in rows])
        hidden, final = self._states.take(names, token_range(rows, own))
        return feature_batch(rows[own], hidden, final, self.spec)

    @contextmanager
    def decoding(self) -> Generator[bool]:
        """Let the island's first rank decode: it gets True, and the others False once it is done.

        In between they run the first rank's prefills with it, so that the island stays in step whatever the
        draft proposes on each rank. A collective of the island. After an exception in the block the others
        are not let go: the run is aborted.
        """
        if self._place.topology.tp_size == 1:
            yield True
        elif self._place.tp_rank > 0:
            while (step := self._broadcast(None)) is not None:
                self._extend(*step)
            yield False
        else:
            self._leading = True
            yield True
            self._leading = False
            self._broadcast(None)

    def start(self) -> list[int]:
        """An empty sequence."""
        return []

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: list[int]) -> Extension:
        """Append `ids` [n] int64 to the sequence in `cache`. Above tp 1, only inside of `decoding`.

        Raises:
            ValueError: if the sequence gets longer than the engine's context.
        """
        if self._place.topology.tp_size > 1 and not self._leading:
            raise RuntimeError("an island decodes inside of `decoding`, on its first rank")
        cache.extend(ids.tolist())
        self._require_room([len(cache)], "an evaluated prompt and its answer")
        step = (cache, len(ids))
        if self._leading:
            self._broadcast(step)
        return self._extend(*step)

    def crop(self, cache: list[int], length: int) -> None:
        """Forget all but the first `length` tokens of the sequence in `cache`."""
        del cache[length:]

    def close(self) -> None:
        """Free the engine's memory; its process groups end with the trainer's."""
        del self._engine, self._states
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _extend(self, tokens: Sequence[int], count: int) -> Extension:
        self._engine.prefill([tokens])
        hidden, logits = self._states.take_with_logits(count)
        return Extension(logits=logits, hidden=hidden)

    def _broadcast(self, step: tuple[list[int], int] | None) -> tuple[list[int], int] | None:
        """The first rank's step, on every rank of the island."""
        first = self._place.topology.islands[self._place.island][0]
        shared = [step]
        dist.broadcast_object_list(shared, src=first, group=self._engine.group)
        return shared[0]

    def _require_room(self, lengths: Sequence[int], what: str) -> None:
        if not lengths or min(lengths) == 0:
            raise ValueError(
                f"nothing to capture in {what}: {list(lengths)} tokens; required: at least one each"
            )
        limits = {
            "engine.context_length": (max(lengths), self._most_tokens),
            "engine.max_running_requests": (len(lengths), self._most_rows),
            "engine.max_total_tokens": (sum(lengths), self._engine.token_slots),
        }
        for name, (found, limit) in limits.items():
            if found > limit:
                raise ValueError(
                    f"{what} need {found}, but {name} is {limit}; required: raise it, or shorter rows"
                )


@contextmanager
def _sglang_environment(device: torch.device, tp_size: int) -> Generator[None]:
    """Set what SGLang reads when it starts, and keep the trainer's number of threads, which it changes."""
    os.environ |= engine_environment("cuda" if device.type == "cuda" else "cpu", tp_size)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
