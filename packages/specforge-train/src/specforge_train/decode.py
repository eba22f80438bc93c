"""Speculative decoding against any target, and its measurement.

A round takes the last emitted token as the *anchor*. The draft proposes γ tokens behind it; the target reads
the anchor and the proposals in one pass, and `verification` decides how many are accepted and what the
*bonus* behind them is. Greedy output equals the target's own, whatever the draft proposes; sampled output is
distributed as the target's own.

Source: arXiv 2211.17192.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specforge_train.counts import DecodeCounts, Decoded, PlainOutput
from specforge_train.verification import GREEDY, Proposal, Verification, rule_for

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

    def propose(
        self, new_hidden: Tensor, position: int, anchor: int, rule: Verification = GREEDY
    ) -> Proposal:
        """A block behind the anchor, each of its tokens chosen by the rule from its logits [V].

        `new_hidden` [n, K·H] are the target's states of the tokens from the last call's anchor (or the
        sequence's start) up to the one before this anchor, which stands at `position`.
        """
        ...


def _choose(rule: Verification, logits: Tensor) -> int:
    """A token from logits [V]."""
    return int(rule.choice(logits, rule.draws(1, logits.device)[0]))


def _prefill(target: DecodingTarget, prompt: Tensor, cache: Any, rule: Verification) -> tuple[int, Tensor]:
    """The first token after the prompt, and the prompt's states [P, K·H]."""
    if not prompt.numel():
        raise ValueError("the prompt is empty, required at least one token")
    parts = [target.extend(part, cache) for part in prompt.split(PREFILL_TOKENS)]
    return _choose(rule, parts[-1].logits[-1]), torch.cat([part.hidden for part in parts])


def _cut(tokens: list[int], limit: int, stop_ids: Collection[int]) -> tuple[list[int], bool]:
    """Tokens up to the limit and up to a stop token, included; and whether decoding ends with them."""
    tokens = tokens[:limit]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], True
    return tokens, len(tokens) == limit


@torch.no_grad()
def plain_decode(
    target: DecodingTarget,
    prompt: Tensor,
    max_new_tokens: int,
    stop_ids: Iterable[int],
    rule: Verification | None = None,
) -> list[int]:
    """The target's own output, one token a pass.

    Args:
        target: to decode with.
        prompt: [P] int64, P >= 1.
        max_new_tokens: tokens to emit at most, at least 1.
        stop_ids: tokens that end the output; the one that does is emitted.
        rule: how tokens are chosen; greedily by default.
    """
    stop, rule = frozenset(stop_ids), rule or GREEDY
    cache = target.start()
    token, _ = _prefill(target, prompt, cache, rule)
    tokens, done = _cut([token], max_new_tokens, stop)
    while not done:
        token = _choose(rule, target.extend(torch.tensor(tokens[-1:]), cache).logits[-1])
        new, done = _cut([token], max_new_tokens - len(tokens), stop)
        tokens += new
    return tokens


@torch.no_grad()
def speculative_decode(
    target: DecodingTarget,
    drafter: Drafter,
    prompt: Tensor,
    max_new_tokens: int,
    stop_ids: Iterable[int],
    rule: Verification | None = None,
) -> Decoded:
    """Output of the same kind with the draft's help; arguments as `plain_decode`."""
    stop, rule = frozenset(stop_ids), rule or GREEDY
    cache = target.start()
    drafter.begin()
    anchor, new_hidden = _prefill(target, prompt, cache, rule)
    position = prompt.numel()
    tokens, done = _cut([anchor], max_new_tokens, stop)
    decoded, confidence = Decoded(tokens), []
    while not done:
        proposal = drafter.propose(new_hidden, position, anchor, rule)
        first = torch.tensor([anchor]).to(proposal.tokens.device, non_blocking=True)
        step = target.extend(torch.cat([first, proposal.tokens]), cache)
        accepted, own = rule.verify(proposal, step.logits)
        new, done = _cut(own, max_new_tokens - len(tokens), stop)
        tokens += new
        decoded.emitted.append(len(new))
        decoded.accepted.append(min(accepted, len(new)))
        decoded.drafted.append(min(drafter.block_size, len(new)) if done else drafter.block_size)
        confidence.append(proposal.confidence)
        position += accepted + 1
        target.crop(cache, position)
        anchor, new_hidden = own[accepted], step.hidden[: accepted + 1]
    decoded.confidence = torch.stack(confidence).tolist() if confidence else []
    return decoded


def evaluate(
    target: DecodingTarget,
    drafter: Drafter,
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    stop_ids: Iterable[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    on_prompt: Callable[[DecodeCounts, Decoded], None] | None = None,
    own_outputs: dict[tuple[int, ...], PlainOutput] | None = None,
) -> DecodeCounts:
    """Decode every prompt with and without the draft, and compare.

    Args:
        target: to decode with.
        drafter: of the draft that is measured.
        prompts: [P] int64 each.
        max_new_tokens: tokens to emit at most for each.
        stop_ids: tokens that end an output.
        temperature: 0 decodes greedily.
        seed: of the random streams, one a prompt.
        on_prompt: called after each prompt with the counts so far and with its decoding.
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
            tokens = plain_decode(target, prompt, max_new_tokens, stop, rule_for(temperature, seed, prompt))
            own_outputs[key] = PlainOutput(tokens, time.perf_counter() - start)
        start = time.perf_counter()
        rule = rule_for(temperature, seed, prompt)
        decoded = speculative_decode(target, drafter, prompt, max_new_tokens, stop, rule)
        counts.add(decoded, own_outputs[key], time.perf_counter() - start)
        if on_prompt is not None:
            on_prompt(counts, decoded)
    return counts
