"""Choosing tokens from logits, each sequence by draws of its own.

A sequence's draws depend on its key alone (the counter-based Philox of Salmon et al., SC 2011), and one
draw chooses one token through the inverse of the cumulative distribution. What is sampled thus does not
depend on which sequences decode at the same time, up to the rounding of their logits.

Notation: B sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Share of the probability that the candidates hold."""
    seed: int = 0


def uniform_draws(seed: int, key: Sequence[int], count: int) -> np.ndarray:
    """`count` numbers in [0, 1), [count] float32, for the sequence `key` under `seed`.

    Raw 64-bit draws are converted here: numpy keeps those stable over its versions.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, *key])).random_raw(count)
    return ((raw >> np.uint64(40)) * 2.0**-24).astype(np.float32)


def choose(logits: Tensor, sampling: Sampling, draws: Tensor | None = None) -> Tensor:
    """The next token of each sequence.

    Args:
        logits: [B, V] of any float type.
        sampling: how to choose.
        draws: [B] in [0, 1), needed above temperature 0.

    Returns:
        [B] int64.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    assert draws is not None
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    order = None
    if sampling.top_p < 1:
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    # A product rounded up to the total would choose behind the last candidate.
    chosen = torch.minimum(chosen, torch.searchsorted(cumulative, total.contiguous()))
    return (chosen if order is None else order.gather(-1, chosen))[:, 0]
