"""Decoding one sequence with a transformers model, by steps that are recorded where that pays.

Steps of a length that comes again and again (one token when the target decodes alone, a block when it
verifies a draft) may be recorded, as a CUDA graph, and replayed: their attention reads the cache at its
capacity, under a mask made on the device from the positions. All other steps run as they are and read only
what is there.

Notation: n new tokens, K captured layers, H hidden size, V vocabulary.
"""

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specforge_capture.targets.attention import Slots
from specforge_capture.targets.cache import SlotCache

RECORDED_TOKENS = 32
"""Longer steps are not recorded: their kernels are worth their launches."""
RECORDED_FROM = 3
"""The step of a length that is recorded, counted from 1: a prompt's length comes once."""
_LEAST_CAPACITY = 512

_log = logging.getLogger(__name__)

Step = Callable[..., tuple[Tensor, ...]]
"""Tokens [n] and their positions [n] on the device -> logits [n, V], states [n, K·H]."""

Recorder = Callable[[Step, tuple[Tensor, ...]], Step]
"""Makes a step, from its first inputs, one that is replayed; RuntimeError says that it waits for a device."""


class Forward(Protocol):
    """The model over the tokens of one sequence."""

    def __call__(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, slots: Slots | None
    ) -> tuple[Tensor, Tensor]:
        """As `Step`; without slots the tokens are the last of those that the cache gives to read."""
        ...


class SequenceSteps:
    """The cache of one sequence at a time, and the steps recorded over it.

    Args:
        forward: the model.
        device: of the model.
        record: for steps of a few tokens; None runs all as they are.
    """

    def __init__(self, forward: Forward, device: torch.device, record: Recorder | None) -> None:
        self._forward, self._device, self._record = forward, device, record
        self._cache = SlotCache(1)
        self._met: Counter[int] = Counter()
        self._recorded: dict[int, Step | None] = {}

    def run(self, ids: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Append `ids` [n] to the first `first` tokens of the sequence: logits [n, V], states [n, K·H]."""
        count, end = len(ids), first + len(ids)
        self._reserve(end)
        ids = ids.to(self._device, non_blocking=True)
        positions = torch.arange(first, end, device=self._device)
        if (step := self._step_for(ids, positions)) is not None:
            logits, hidden = step(ids, positions)
            return logits, hidden
        self._cache.write(self._rows(count), positions, read=(1, end))
        return self._forward(ids, positions, self._cache, None)

    def at_capacity(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A `Step` of fixed shapes whose positions the host need not know: what is recorded."""
        width = self._cache.capacity
        self._cache.write(self._rows(len(ids)), positions, read=(1, width))
        return self._forward(ids, positions, self._cache, Slots(positions[None], width))

    def _step_for(self, ids: Tensor, positions: Tensor) -> Step | None:
        count = len(ids)
        if self._record is None or count > RECORDED_TOKENS:
            return None
        self._met[count] += 1
        if count not in self._recorded and self._met[count] >= RECORDED_FROM:
            try:
                self._recorded[count] = self._record(self.at_capacity, (ids, positions))
            except RuntimeError as error:  # a model that waits for the device, as some mixtures of experts do
                _log.info("a step of %d tokens cannot be recorded: %s", count, error)
                self._recorded[count] = None
        return self._recorded.get(count)

    def _reserve(self, length: int) -> None:
        if length > self._cache.capacity:
            self._recorded.clear()  # they hold the buffers' old places
            self._cache.reserve(max(_LEAST_CAPACITY, 2 * self._cache.capacity, length))

    def _rows(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self._device)


@dataclass
class DecodedSequence:
    """What `HFTarget.start` gives: a sequence and where its keys and values lie."""

    steps: SequenceSteps
    length: int = 0
    """Tokens in the cache that count."""
