"""Greedy speculative decoding against any target, and its measurement.

A round takes the last emitted token as the *anchor*. The draft proposes γ tokens behind it; the target reads
the anchor and the proposals in one pass and chooses its own next token after each of the γ+1. Proposals are
accepted up to the first that differs from the target's choice, and the choice there is emitted as the
*bonus*. All emitted tokens are thus the target's own choices: the output equals plain greedy decoding,
whatever the draft proposes (arXiv 2211.17192).

The acceptance length τ is emitted tokens per round, the bonus included. A round cut by a stop token or by the
limit counts what it emitted; slots behind the cut count as not drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

PREFILL_TOKENS = 512
"""Prompt tokens of one pass: bounds the logits, of which a target returns one row a token."""


class Extension(Protocol):
    """What a target says about n tokens."""

    @property
    def logits(self) -> Tensor:
        """[n, V]: row i is about the token after the i-th."""
        ...

    @property
    def hidden(self) -> Tensor:
        """[n, K·H] states of the captured layers."""
        ...


class DecodingTarget(Protocol):
    """A target that decodes one sequence."""

    def start(self) -> Any:
        """An empty cache."""
        ...

    def extend(self, ids: Tensor, cache: Any) -> Extension:
        """Append `ids` [n] int64, on any device, to the sequence in `cache`."""
        ...

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence."""
        ...


class Drafter(Protocol):
    """The inference side of a draft."""

    block_size: int
    """γ, tokens of a proposal."""

    def begin(self) -> None:
        """Start a new sequence."""
        ...

    def propose(self, new_hidden: Tensor, position: int, anchor: int) -> tuple[Tensor, Tensor]:
        """Tokens [γ] int64 behind the anchor, and their acceptance probabilities [γ].

        `new_hidden` [n, K·H] are the target's states of the tokens from the last call's anchor (or the
        sequence's start) up to the one before this anchor, which stands at `position`.
        """
        ...


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
    """Prompts whose speculative output equals the target's greedy output."""
    total: int = 0
    """Prompts."""
    tokens: int = 0
    """Tokens generated, the same with and without speculation."""
    seconds_speculative: float = 0.0
    seconds_greedy: float = 0.0

    @classmethod
    def zeros(cls, block_size: int) -> DecodeCounts:
        """No prompts, for blocks of `block_size` slots."""
        return cls([0] * block_size, [0] * block_size)

    def add(self, decoded: Decoded) -> None:
        """Add the rounds of one decoding."""
        self.rounds += len(decoded.emitted)
        self.emitted += sum(decoded.emitted)
        for slot in range(len(self.accepted)):
            self.accepted[slot] += sum(count > slot for count in decoded.accepted)
            self.drafted[slot] += sum(count > slot for count in decoded.drafted)

    def to_vector(self) -> Tensor:
        """[7 + 2γ] float64, to be summed over ranks."""
        scalars = [self.rounds, self.emitted, self.identical, self.total, self.tokens]
        seconds = [self.seconds_speculative, self.seconds_greedy]
        return torch.tensor([*scalars, *seconds, *self.accepted, *self.drafted], dtype=torch.float64)

    @classmethod
    def from_vector(cls, vector: Tensor) -> DecodeCounts:
        """The counts of a (summed) vector."""
        values = vector.tolist()
        slots = [round(value) for value in values[7:]]
        half = len(slots) // 2
        counts = [round(value) for value in values[:5]]
        return cls(slots[:half], slots[half:], *counts, *values[5:7])

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


def _prefill(target: DecodingTarget, prompt: Tensor, cache: Any) -> tuple[int, Tensor]:
    """The first token after the prompt, and the prompt's states [P, K·H]."""
    if not prompt.numel():
        raise ValueError("the prompt is empty, required at least one token")
    parts = [target.extend(part, cache) for part in prompt.split(PREFILL_TOKENS)]
    return int(parts[-1].logits[-1].argmax()), torch.cat([part.hidden for part in parts])


def _cut(tokens: list[int], limit: int, stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """Tokens up to the limit and up to a stop token, included; and whether decoding ends with them."""
    tokens = tokens[:limit]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], True
    return tokens, len(tokens) == limit


@torch.no_grad()
def greedy_decode(
    target: DecodingTarget, prompt: Tensor, max_new_tokens: int, stop_ids: Iterable[int]
) -> list[int]:
    """The target's own greedy output, one token a pass.

    Args:
        target: to decode with.
        prompt: [P] int64, P >= 1.
        max_new_tokens: tokens to emit at most, at least 1.
        stop_ids: tokens that end the output; the one that does is emitted.
    """
    stop = frozenset(stop_ids)
    cache = target.start()
    token, _ = _prefill(target, prompt, cache)
    tokens, done = _cut([token], max_new_tokens, stop)
    while not done:
        token = int(target.extend(torch.tensor(tokens[-1:]), cache).logits[-1].argmax())
        new, done = _cut([token], max_new_tokens - len(tokens), stop)
        tokens += new
    return tokens


@torch.no_grad()
def speculative_decode(
    target: DecodingTarget, drafter: Drafter, prompt: Tensor, max_new_tokens: int, stop_ids: Iterable[int]
) -> Decoded:
    """The same output with the draft's help; arguments as `greedy_decode`."""
    stop = frozenset(stop_ids)
    cache = target.start()
    drafter.begin()
    anchor, new_hidden = _prefill(target, prompt, cache)
    position = prompt.numel()
    tokens, done = _cut([anchor], max_new_tokens, stop)
    decoded = Decoded(tokens)
    while not done:
        proposal, _ = drafter.propose(new_hidden, position, anchor)
        step = target.extend(torch.cat([proposal.new_tensor([anchor]), proposal]), cache)
        choice = step.logits.argmax(-1)
        both = torch.cat([proposal.to(choice.device), choice]).tolist()
        proposed, own = both[: drafter.block_size], both[drafter.block_size :]
        accepted = next((k for k, token in enumerate(proposed) if token != own[k]), drafter.block_size)
        new, done = _cut(own[: accepted + 1], max_new_tokens - len(tokens), stop)
        tokens += new
        decoded.emitted.append(len(new))
        decoded.accepted.append(min(accepted, len(new)))
        decoded.drafted.append(min(drafter.block_size, len(new)) if done else drafter.block_size)
        position += accepted + 1
        target.crop(cache, position)
        anchor, new_hidden = own[accepted], step.hidden[: accepted + 1]
    return decoded


def evaluate(
    target: DecodingTarget,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    stop_ids: Iterable[int],
    on_prompt: Callable[[DecodeCounts], None] | None = None,
    own_outputs: dict[tuple[int, ...], PlainOutput] | None = None,
) -> DecodeCounts:
    """Decode every prompt with and without the draft, and compare.

    Args:
        target: to decode with.
        drafter: of the draft that is measured.
        prompts: [P] int64 each.
        max_new_tokens: tokens to emit at most for each.
        stop_ids: tokens that end an output.
        on_prompt: called with the counts so far after each prompt.
        own_outputs: prompt -> the target's own output with these settings; what is missing is added. The
            target is frozen: a later evaluation need not decode them again.
    """
    stop = frozenset(stop_ids)
    own_outputs = {} if own_outputs is None else own_outputs
    counts = DecodeCounts.zeros(drafter.block_size)
    for prompt in prompts:
        key = tuple(prompt.tolist())
        if key not in own_outputs:
            start = time.perf_counter()
            tokens = greedy_decode(target, prompt, max_new_tokens, stop)
            own_outputs[key] = PlainOutput(tokens, time.perf_counter() - start)
        own = own_outputs[key]
        start = time.perf_counter()
        decoded = speculative_decode(target, drafter, prompt, max_new_tokens, stop)
        counts.seconds_speculative += time.perf_counter() - start
        counts.seconds_greedy += own.seconds
        counts.add(decoded)
        counts.identical += decoded.tokens == own.tokens
        counts.total += 1
        counts.tokens += len(own.tokens)
        if on_prompt is not None:
            on_prompt(counts)
    return counts
