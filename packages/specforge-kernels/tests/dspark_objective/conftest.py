"""Cases of the DSpark objective, and its definition written plainly in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Case:
    """Arguments of `dspark_objective`, without the loss weights."""

    hidden: Tensor
    markov: Tensor | None
    confidence: Tensor | None
    head: Tensor
    w2: Tensor | None
    last_hidden: Tensor
    teacher_index: Tensor
    labels: Tensor
    weights: Tensor

    @property
    def arguments(self) -> tuple:
        return tuple(self.__dict__.values())

    @property
    def trained(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.hidden, self.markov, self.w2, self.confidence) if x is not None)


def draw(
    anchors,
    block,
    tokens,
    width,
    vocabulary,
    rank=8,
    markov=True,
    confidence=True,
    dtype=torch.float64,
    device="cpu",
) -> Case:
    """Random states; slot k of the block at anchor p is taught by row p + k, and does not count past the
    end.
    """

    def normal(*size, scale=1.0):
        return (scale * torch.randn(size)).to(device, dtype)

    slots = len(anchors) * block
    position = (torch.tensor(anchors)[:, None] + torch.arange(block)).reshape(-1)
    return Case(
        normal(slots, width).requires_grad_(),
        normal(slots, rank).requires_grad_() if markov else None,
        torch.randn(slots).to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
        if confidence
        else None,
        normal(vocabulary, width, scale=width**-0.5),
        normal(vocabulary, rank, scale=rank**-0.5).requires_grad_() if markov else None,
        normal(tokens, width),
        position.clamp(max=tokens - 1),
        torch.randint(0, vocabulary, (slots,)),
        torch.exp(-torch.arange(block) / 4).repeat(len(anchors)) * (position + 1 < tokens),
    )


def plain(case: Case, factors) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss over all slots at once in float64, and the metrics."""
    double = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in case.arguments]
    hidden, markov, confidence, head, w2, last_hidden, teacher_index, labels, weights = double
    teacher_index, labels, weights = (x.to(hidden.device) for x in (teacher_index, labels, weights))
    logits = hidden @ head.T
    if markov is not None:
        logits = logits + markov @ w2.T
    p = logits.softmax(-1)
    q = (last_hidden @ head.T)[teacher_index].softmax(-1)
    ce = F.cross_entropy(logits, labels, reduction="none")
    l1 = (p - q).abs().sum(-1)
    acceptance = (1 - l1.detach() / 2).clamp(0, 1)
    bce = torch.zeros_like(ce)
    if confidence is not None:
        c = confidence.sigmoid()
        bce = -(acceptance * c.log() + (1 - acceptance) * (1 - c).log())
    counted = weights > 0
    sums = {"ce": (weights * ce).sum(), "l1": (weights * l1).sum(), "confidence": (weights * bce).sum()}
    loss = factors.ce * sums["ce"] + factors.l1 * sums["l1"] + factors.confidence * sums["confidence"]
    correct = (p.argmax(-1) == q.argmax(-1)) & counted
    return loss, sums | {"acceptance": acceptance * counted, "correct": correct}


@pytest.fixture
def draw_case() -> Callable[..., Case]:
    return draw


@pytest.fixture
def plain_objective() -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    return plain
