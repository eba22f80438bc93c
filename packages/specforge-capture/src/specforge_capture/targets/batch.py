"""Continuous batching of a transformers model: many sequences decode together, one token each a step.

A sequence enters a free slot by a packed prefill (no padding) that leaves its keys and values there, and
leaves it when its answer ends; the last slot then moves into the hole, so that running sequences are always
slots 0 … n-1 and a step computes nothing else. The host reads tokens every `STRIDE` steps only, so that it
never waits for the device in between; what a sequence decodes behind its end until then is cut off.

Invariant: a sequence's tokens depend on its prompt and its draws, not on its neighbours (up to rounding).

Notation: B slots, n running sequences, T packed prompt tokens.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from specforge_capture.targets.attention import Documents, Slots
from specforge_capture.targets.cache import SlotCache
from specforge_capture.targets.loading import decoder_layers
from specforge_capture.targets.sampling import Sampling, choose, uniform_draws

STRIDE = 8
"""Steps between looks at what was decoded."""
PREFILL_TOKENS = 8192
"""Prompt tokens of one prefill, unless a single prompt is longer."""
_ALIGNMENT = 64
"""Attention reads a multiple of so many keys: kernels like aligned masks, and meet fewer shapes."""
# cuDNN's attention plans each shape anew, and here shapes change with every step.
_DECODE_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    key: tuple[int, ...]
    """Names the request; the draws of its answer depend on it."""
    prompt: list[int]
    limit: int
    """Longest answer in tokens, at least 1."""


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    tokens: list[int]
    """The stop token included, where one ended it."""
    finish: Literal["stop", "length"]


@dataclass
class _Running:
    request: Request
    draws: np.ndarray | None
    """[limit + STRIDE] of its answer; None for greedy decoding."""
    tokens: list[int]
    """Chosen so far. The last of them is not in the cache yet."""

    @property
    def cached(self) -> int:
        """Tokens in the cache."""
        return len(self.request.prompt) + len(self.tokens) - 1


class DecodingBatch:
    """Answers requests, up to `slots` at a time.

    Args:
        model: as `load_model` gives it, on its device.
        stop_ids: tokens that end an answer.
        slots: sequences that decode at once.
        sampling: how tokens are chosen.

    Raises:
        ValueError: for a model whose attention cannot be run here.
    """

    def __init__(
        self, model: PreTrainedModel, stop_ids: Collection[int], slots: int, sampling: Sampling
    ) -> None:
        decoder_layers(model)
        self.model, self.stop_ids, self.sampling = model, frozenset(stop_ids), sampling
        self.device = model.device
        self._cache = SlotCache(slots)
        self._running: list[_Running] = []
        self._last = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._lengths = torch.zeros(slots, dtype=torch.int64, device=self.device)

    @property
    def running(self) -> int:
        """Sequences that decode now."""
        return len(self._running)

    @property
    def unfinished(self) -> int:
        """Tokens so far of the answers that are being written."""
        return sum(min(len(r.tokens), r.request.limit) for r in self._running)

    @property
    def free(self) -> int:
        """Slots that decode nothing."""
        return self._cache.slots - len(self._running)

    @torch.inference_mode()
    def admit(self, requests: Sequence[Request]) -> None:
        """Prefill at most `free` requests, in portions, and choose the first token of each answer."""
        assert len(requests) <= self.free
        portion: list[Request] = []
        for request in requests:
            if portion and sum(len(r.prompt) for r in [*portion, request]) > PREFILL_TOKENS:
                self._prefill(portion)
                portion = []
            portion.append(request)
        if portion:
            self._prefill(portion)

    @torch.inference_mode()
    def advance(self) -> list[tuple[Request, Answer]]:
        """Decode up to `STRIDE` tokens of every running sequence; the answers that ended, whose slots are now
        free.
        """
        wanted = max((r.request.limit - len(r.tokens) for r in self._running), default=0)
        count = min(STRIDE, wanted)
        if count > 0:
            draws = self._draws(self._running, count)
            with sdpa_kernel(_DECODE_KERNELS):
                steps = [self._step(ahead, draws) for ahead in range(count)]
            for sequence, tokens in zip(self._running, torch.stack(steps, dim=1).tolist(), strict=True):
                sequence.tokens += tokens
        return self._remove_ended()

    def _prefill(self, requests: list[Request]) -> None:
        lengths = [len(request.prompt) for request in requests]
        offsets = np.cumsum([0, *lengths])
        first, end = self.running, self.running + len(requests)
        self._cache.reserve(max(lengths))
        ids = self._moved(np.concatenate([request.prompt for request in requests]).astype(np.int64))
        positions = self._moved(np.concatenate([np.arange(length) for length in lengths]))
        self._cache.write(self._moved(np.repeat(np.arange(first, end), lengths)), positions)
        logits = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=self._cache,
            documents=Documents(tuple(offsets.tolist()), self._moved(offsets.astype(np.int32)), max(lengths)),
            logits_to_keep=self._moved(offsets[1:] - 1),
        ).logits[0]
        entering = [_Running(request, self._own_draws(request), []) for request in requests]
        draws = self._draws(entering, 1)
        chosen = choose(logits, self.sampling, None if draws is None else draws[:, 0])
        self._lengths[first:end], self._last[first:end] = self._moved(np.array(lengths)), chosen
        for sequence, token in zip(entering, chosen.tolist(), strict=True):
            sequence.tokens.append(token)
        self._running += entering

    def _step(self, ahead: int, draws: Tensor | None) -> Tensor:
        """Read the last token of each running sequence and choose the next, [n]: step `ahead` of a call."""
        n, lengths = self.running, self._lengths[: self.running]
        reach = max(sequence.cached for sequence in self._running) + ahead + 1
        self._cache.reserve(reach)
        width = min(-(-reach // _ALIGNMENT) * _ALIGNMENT, self._cache.capacity)
        self._cache.write(torch.arange(n, device=self.device), lengths, read=(n, width))
        logits = self.model(
            input_ids=self._last[:n, None],
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            slots=Slots(lengths[:, None], width),
            logits_to_keep=1,
        ).logits[:, -1]
        chosen = choose(logits, self.sampling, None if draws is None else draws[:, ahead])
        lengths += 1
        self._last[:n] = chosen
        return chosen

    def _own_draws(self, request: Request) -> np.ndarray | None:
        if self.sampling.temperature == 0:
            return None
        return uniform_draws(self.sampling.seed, request.key, request.limit + STRIDE)

    def _draws(self, sequences: Sequence[_Running], count: int) -> Tensor | None:
        """[len(sequences), count]: what the next `count` tokens of each are chosen by."""
        if self.sampling.temperature == 0:
            return None
        rows = [r.draws[len(r.tokens) : len(r.tokens) + count] for r in sequences if r.draws is not None]
        return self._moved(np.stack(rows))

    def _moved(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _remove_ended(self) -> list[tuple[Request, Answer]]:
        """Take out sequences that ended; those from the end move into their slots."""
        ended = [(i, answer) for i, r in enumerate(self._running) if (answer := self._ended(r))]
        answers = [(self._running[i].request, answer) for i, answer in ended]
        gone = {i for i, _ in ended}
        left = self.running - len(gone)
        holes = [i for i in sorted(gone) if i < left]
        sources = [i for i in range(left, self.running) if i not in gone]
        if holes:
            self._cache.move(sources, holes, max(self._running[i].cached for i in sources))
            self._last[holes], self._lengths[holes] = self._last[sources], self._lengths[sources]
            for source, hole in zip(sources, holes, strict=True):
                self._running[hole] = self._running[source]
        del self._running[left:]
        return answers

    def _ended(self, sequence: _Running) -> Answer | None:
        limit = sequence.request.limit
        for index, token in enumerate(sequence.tokens[:limit]):
            if token in self.stop_ids:
                return Answer(sequence.tokens[: index + 1], "stop")
        return Answer(sequence.tokens[:limit], "length") if len(sequence.tokens) >= limit else None
