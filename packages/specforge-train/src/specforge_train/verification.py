"""How a target judges a draft's proposals: greedily, or by the rejection rule that keeps its distribution.

Let x_k be the draft's k-th proposal, drawn from q_k, and p_k the target's distribution at that place.

    greedy     accept while x_k = argmax p_k; emit argmax p_k at the first that differs
    sampling   accept with probability min(1, p_k(x_k) / q_k(x_k)); at the first rejection emit a draw from
               max(p_k - q_k, 0), normalised; after γ acceptances a draw from p_γ

Both emit what the target alone would: its own tokens, or tokens distributed as its own.

Source: arXiv 2211.17192, algorithm 1.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Proposal(NamedTuple):
    """A block that a draft proposes behind an anchor."""

    tokens: Tensor
    """[γ] int64."""
    confidence: Tensor
    """[γ] float32: predicted probability that the slot is accepted, given that those before it are."""
    logits: Tensor
    """[γ, V] that the tokens were chosen from."""


@dataclass(frozen=True)
class Choice:
    """How a token is chosen from logits: the first-ranked one at temperature 0, by a draw above."""

    temperature: float = 0.0

    def __call__(self, logits: Tensor, draw: Tensor) -> Tensor:
        """A token [] from logits [V]; `draw` [] float64, uniform in [0, 1), alone decides between tokens of
        softmax(logits / temperature). Nothing here waits for the device.
        """
        return _draw(self.distribution(logits), draw) if self.temperature else logits.argmax()

    def distribution(self, logits: Tensor) -> Tensor:
        """softmax(logits / temperature) [..., V] in float64."""
        return (logits.double() / self.temperature).softmax(-1)


class Verification(Protocol):
    """One rule; it may keep a random stream, so that one serves one sequence."""

    choice: Choice
    """Of the draft for a proposal, of the target on its own."""

    def draws(self, count: int, device: torch.device) -> Tensor:
        """What the next `count` choices are made by, [count] float64."""
        ...

    def verify(self, proposal: Proposal, logits: Tensor) -> tuple[int, list[int]]:
        """Number of accepted proposals, and the tokens to emit: those and the bonus.

        `logits` [γ + 1, V] are the target's behind the anchor and behind each proposal.
        """
        ...


class Greedy:
    """The rule at temperature 0."""

    choice = Choice()

    def draws(self, count: int, device: torch.device) -> Tensor:
        """Zeros, which nothing depends on."""
        return torch.zeros(count, dtype=torch.float64, device=device)

    def verify(self, proposal: Proposal, logits: Tensor) -> tuple[int, list[int]]:
        """See `Verification.verify`."""
        choice = logits.argmax(-1)
        gamma = proposal.tokens.shape[0]
        both = torch.cat([proposal.tokens.to(choice.device), choice]).tolist()  # one wait for the device
        proposed, own = both[:gamma], both[gamma:]
        accepted = next((k for k in range(gamma) if proposed[k] != own[k]), gamma)
        return accepted, own[: accepted + 1]


GREEDY = Greedy()


class Sampling:
    """The rule at a temperature above 0.

    Args:
        temperature: divides the logits of draft and target.
        seed: of the random stream, which lies on the host and so is the same on every device.
    """

    def __init__(self, temperature: float, seed: int) -> None:
        if temperature <= 0:
            raise ValueError(f"the temperature is {temperature}; required: above 0, or greedy decoding")
        self.choice = Choice(temperature)
        self._random = torch.Generator().manual_seed(seed)

    def draws(self, count: int, device: torch.device) -> Tensor:
        """The stream's next numbers."""
        return torch.rand(count, generator=self._random, dtype=torch.float64).to(device)

    def verify(self, proposal: Proposal, logits: Tensor) -> tuple[int, list[int]]:
        """See `Verification.verify`."""
        gamma, tokens = proposal.tokens.shape[0], proposal.tokens.to(logits.device)
        target = self.choice.distribution(logits)
        draft = self.choice.distribution(proposal.logits.to(logits.device))
        wanted, offered = (x[:gamma].gather(1, tokens[:, None])[:, 0] for x in (target, draft))
        draws = self.draws(gamma + 1, logits.device)
        rejected = (draws[:gamma] * offered >= wanted).tolist()
        accepted = next((k for k in range(gamma) if rejected[k]), gamma)
        if accepted == gamma:
            rest = target[gamma]
        else:
            rest = (target[accepted] - draft[accepted]).clamp(min=0)
            # Equal distributions reject only by rounding; then any draw from the target is right.
            rest = torch.where(rest.sum() > 0, rest, target[accepted])
        return accepted, torch.cat([tokens[:accepted], _draw(rest, draws[gamma])[None]]).tolist()


def _draw(weights: Tensor, draw: Tensor) -> Tensor:
    """Invert the cumulated weights [V], which need not sum to 1, at `draw` [] in [0, 1)."""
    cumulated = weights.cumsum(-1)
    found = torch.searchsorted(cumulated, (draw * cumulated[-1])[None], right=True)[0]
    return found.clamp(max=weights.shape[-1] - 1)


def rule_for(temperature: float, seed: int, prompt: Tensor) -> Verification:
    """The rule for one prompt [P]: its stream depends on the seed and the prompt alone, not on which process
    decodes it or after which others.
    """
    if temperature == 0:
        return GREEDY
    return Sampling(temperature, zlib.crc32(prompt.to(torch.int64).cpu().numpy().tobytes(), seed))
