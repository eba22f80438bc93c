"""Keys and values of sequences that decode, in buffers that only move when they grow.

Notation: B slots, L capacity in tokens, Hkv heads of width D, T new tokens of all sequences.
"""

from typing import Any

import torch
from torch import Tensor

GROWTH = 256
"""Tokens that buffers grow by a multiple of."""


class SlotCache:
    """Keys and values of all layers by slot, in the calling convention of transformers' caches."""

    def __init__(self, slots: int) -> None:
        self.slots, self.capacity = slots, 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._rows: Tensor = torch.empty(0)
        self._positions: Tensor = torch.empty(0)
        self._read: tuple[int, int] | None = None

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        self.capacity = -(-length // GROWTH) * GROWTH
        for layer, stored in self._layers.items():
            grown = tuple(self._empty(states) for states in stored)
            for new, old in zip(grown, stored, strict=True):
                new[:, :, : old.shape[2]] = old
            self._layers[layer] = grown[0], grown[1]

    def write(self, rows: Tensor, positions: Tensor, read: tuple[int, int] | None = None) -> None:
        """The next forward writes its tokens' states to `positions` [T] of slots `rows` [T]; its attention
        gets the first `read` = (slots, tokens), or only what the forward itself brings.
        """
        self._rows, self._positions, self._read = rows, positions, read

    def move(self, sources: list[int], holes: list[int], length: int) -> None:
        """Copy the first `length` tokens of slots `sources` to the slots `holes`."""
        for stored in self._layers.values():
            for states in stored:
                states[holes, :, :length] = states[sources, :, :length]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Store [1, Hkv, T, D] or [n, Hkv, 1, D], T or n tokens in all; what attention reads.

        transformers' attention layers call it.
        """
        if layer not in self._layers:
            self._layers[layer] = self._empty(keys), self._empty(values)
        for stored, new in zip(self._layers[layer], (keys, values), strict=True):
            stored[self._rows, :, self._positions] = new.transpose(1, 2).flatten(0, 1)
        if self._read is None:
            return keys, values
        rows, tokens = self._read
        stored = self._layers[layer]
        return stored[0][:rows, :, :tokens], stored[1][:rows, :, :tokens]

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, not whatever memory holds: a masked NaN times zero would still be NaN.
        return like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])
