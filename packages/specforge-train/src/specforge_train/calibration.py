"""Calibration of the confidence head: does a slot that is said to be accepted with probability c get accepted
that often?

The expected calibration error over bins B of equal width is Σ_B |B|/n · |mean c - mean accepted|
(arXiv 1706.04599, equation 3). Temperature scaling (section 4.2 there) divides the logit of c by one number,
fitted by maximum likelihood; it is fitted on half of the prompts and judged on the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specforge_train.counts import Examined

BINS = 10


class Bin(NamedTuple):
    """Proposals of similar confidence."""

    confidence: float
    """Their mean confidence."""
    accepted: float
    """The share of them that was accepted."""
    count: int


@dataclass(frozen=True)
class Calibration:
    """The confidence head against what happened."""

    error: float
    """Expected calibration error of the confidence as it is."""
    bins: list[Bin]
    temperature: float
    """Divides the confidence's logit, fitted on the first half."""
    error_fitted_on_rest: float
    """Expected calibration error of the other half at that temperature."""
    error_of_rest: float
    """The same half as it is."""


def calibrate(prompts: Sequence[Sequence[Examined]]) -> Calibration | None:
    """Judge the confidence of the proposals of each prompt; None for fewer than two prompts with any.

    Prompts are halved by turns, so that no prompt is on both sides.
    """
    prompts = [prompt for prompt in prompts if prompt]
    if len(prompts) < 2:
        return None
    every, fitting, rest = (_columns(part) for part in (prompts, prompts[::2], prompts[1::2]))
    temperature = fit_temperature(*fitting)
    scaled = scale(rest[0], temperature)
    return Calibration(
        calibration_error(*every),
        reliability(*every),
        temperature,
        calibration_error(scaled, rest[1]),
        calibration_error(*rest),
    )


def reliability(confidence: Tensor, accepted: Tensor, bins: int = BINS) -> list[Bin]:
    """Bins of equal width that hold anything, ascending, from confidence [n] and accepted [n] in {0, 1}."""
    which = (confidence * bins).long().clamp(0, bins - 1)
    held = [which == index for index in range(bins)]
    return [
        Bin(float(confidence[mask].mean()), float(accepted[mask].mean()), int(mask.sum()))
        for mask in held
        if mask.any()
    ]


def calibration_error(confidence: Tensor, accepted: Tensor, bins: int = BINS) -> float:
    """Expected calibration error; arguments as `reliability`."""
    rows = reliability(confidence, accepted, bins)
    return sum(row.count * abs(row.confidence - row.accepted) for row in rows) / max(1, len(confidence))


def fit_temperature(confidence: Tensor, accepted: Tensor) -> float:
    """The divisor of the logit with the greatest likelihood, in [1/20, 20], by golden-section search: the
    loss is convex in the divisor's inverse.
    """
    logits = _logit(confidence)

    def loss(inverse: float) -> float:
        return float(F.binary_cross_entropy_with_logits(logits * inverse, accepted))

    low, high, ratio = 0.05, 20.0, (5**0.5 - 1) / 2
    for _ in range(60):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if loss(a) <= loss(b) else (a, high)
    return 2 / (low + high)


def scale(confidence: Tensor, temperature: float) -> Tensor:
    """Confidence [n] with its logit divided by `temperature`."""
    return (_logit(confidence) / temperature).sigmoid()


def _logit(confidence: Tensor) -> Tensor:
    return confidence.clamp(1e-6, 1 - 1e-6).logit()


def _columns(prompts: Sequence[Sequence[Examined]]) -> tuple[Tensor, Tensor]:
    rows = [examined for prompt in prompts for examined in prompt]
    confidence = torch.tensor([row.confidence for row in rows], dtype=torch.float64)
    return confidence, torch.tensor([row.accepted for row in rows], dtype=torch.float64)
