"""What speculative decoding is judged by: emitted tokens, accepted slots, time.

The acceptance length τ is emitted tokens per round, the bonus included. A round cut by a stop token or by the
limit counts what it emitted; slots behind the cut count as not drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Examined(NamedTuple):
    """A proposal that the target judged, all before it in its block being accepted."""

    slot: int
    confidence: float
    """The draft's prediction of `accepted`."""
    accepted: bool


@dataclass
class Decoded:
    """One speculative decoding."""

    tokens: list[int]
    """Emitted tokens, a stop token included."""
    emitted: list[int] = field(default_factory=list)
    """Tokens that each round emitted; the first token of all comes from the prompt's pass and from no round.
    """
    accepted: list[int] = field(default_factory=list)
    """Proposals among them."""
    drafted: list[int] = field(default_factory=list)
    """Slots of each round that could have been emitted."""
    confidence: list[list[float]] = field(default_factory=list)
    """[γ] predictions of each round."""

    def examined(self) -> list[Examined]:
        """The proposals that were judged: in each round the accepted ones and the first that was not."""
        rounds = zip(self.accepted, self.drafted, self.confidence, strict=True)
        return [
            Examined(slot, confidence[slot], slot < accepted)
            for accepted, drafted, confidence in rounds
            for slot in range(min(accepted + 1, drafted))
        ]


class PlainOutput(NamedTuple):
    """What the target generates on its own, and how long that took."""

    tokens: list[int]
    seconds: float


@dataclass
class DecodeCounts:
    """Sums over decoded prompts; add them over prompts and ranks, then read the ratios."""

    accepted: list[int]
    """[γ] rounds in which slot k's proposal was accepted."""
    drafted: list[int]
    """[γ] rounds in which slot k could have been emitted."""
    rounds: int = 0
    emitted: int = 0
    """Tokens emitted by rounds."""
    identical: int = 0
    """Prompts whose speculative output equals the target's own."""
    total: int = 0
    """Prompts."""
    tokens: int = 0
    """Tokens generated with speculation."""
    seconds_speculative: float = 0.0
    seconds_plain: float = 0.0
    tokens_plain: int = 0
    """Tokens that the target generated on its own; the same number where decoding is greedy."""

    @classmethod
    def zeros(cls, block_size: int) -> DecodeCounts:
        """No prompts, for blocks of `block_size` slots."""
        return cls([0] * block_size, [0] * block_size)

    def add(self, decoded: Decoded, plain: PlainOutput, seconds: float) -> None:
        """Add one prompt: its speculative decoding, which took `seconds`, and the target's own output."""
        self.rounds += len(decoded.emitted)
        self.emitted += sum(decoded.emitted)
        for slot in range(len(self.accepted)):
            self.accepted[slot] += sum(count > slot for count in decoded.accepted)
            self.drafted[slot] += sum(count > slot for count in decoded.drafted)
        self.identical += decoded.tokens == plain.tokens
        self.total += 1
        self.tokens += len(decoded.tokens)
        self.tokens_plain += len(plain.tokens)
        self.seconds_speculative += seconds
        self.seconds_plain += plain.seconds

    def to_vector(self) -> Tensor:
        """[8 + 2γ] float64, to be summed over ranks."""
        whole = [self.rounds, self.emitted, self.identical, self.total, self.tokens, self.tokens_plain]
        seconds = [self.seconds_speculative, self.seconds_plain]
        return torch.tensor([*whole, *seconds, *self.accepted, *self.drafted], dtype=torch.float64)

    @classmethod
    def from_vector(cls, vector: Tensor) -> DecodeCounts:
        """The counts of a (summed) vector."""
        values = vector.tolist()
        slots = [round(value) for value in values[8:]]
        half = len(slots) // 2
        *whole, tokens_plain = (round(value) for value in values[:6])
        return cls(slots[:half], slots[half:], *whole, *values[6:8], tokens_plain)

    def __add__(self, other: DecodeCounts) -> DecodeCounts:
        return DecodeCounts.from_vector(self.to_vector() + other.to_vector())

    @property
    def tau(self) -> float:
        """Acceptance length: tokens a round, the bonus included; NaN without rounds."""
        return self.emitted / self.rounds if self.rounds else float("nan")

    @property
    def accept_by_slot(self) -> list[float]:
        """[γ] share of rounds in which slot k was accepted (and with it all slots before); NaN where none was
        drafted.
        """
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [accepted / drafted if drafted else float("nan") for accepted, drafted in pairs]

    @property
    def speedup(self) -> float:
        """Tokens a second with the draft over those without; NaN where nothing was timed."""
        if not (self.seconds_speculative and self.seconds_plain and self.tokens_plain):
            return float("nan")
        return (self.tokens / self.seconds_speculative) / (self.tokens_plain / self.seconds_plain)
