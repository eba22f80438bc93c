"""Loss masks of chats: which tokens did the assistant write, and under which prompt.

For assistant turn k let P_k be the rendering of the messages before it with the generation prompt (what a
server feeds the model) and F_k the rendering through turn k. The answer is what F_k holds beyond P_k.
Invariant: the tokens before every supervised answer are exactly the tokens of P_k, so training and serving
see the same prefix.

Many templates rewrite history (they strip the reasoning of earlier turns, or leave out an empty think block).
Then F_k is no prefix of P_{k+1}, and one packed row cannot serve both turns: the conversation is cut into
several samples, each the longest run of turns whose prefixes agree.

An answer ends with its last special token, the end of turn, which is supervised; what the template writes
behind it (mostly a line break) is not. Where the template has `{% generation %}` markers, they decide inside
the answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specforge_capture.prompts.chat import ChatRenderer, Encoded, Messages, TemplateRefusal
from specforge_capture.prompts.sources import Conversation

INLINE_REASONING_END = "</think>"
"""Closes the reasoning inside a message's own content, where it is not in a field of its own
(`reasoning_content`).

The mark of Qwen3, DeepSeek-R1, GLM and most open reasoning models; only `thinking: drop` looks at it.
"""


NO_ANSWER = "no assistant turn"
"""Why a conversation of prompts alone gives no sample."""


class UnusableConversation(ValueError):
    """A conversation that gives no sample; the message is the reason."""


@dataclass(frozen=True)
class MaskedTokens:
    """One sample of a conversation."""

    turn: int
    """Index of its last assistant turn among the conversation's messages."""
    input_ids: list[int]
    loss_mask: list[bool]


@dataclass(frozen=True)
class _Turn:
    """An assistant turn's renderings."""

    index: int
    prompt: str
    full: str
    probe: str | None
    """With another answer behind the same reasoning; None if reasoning is supervised."""
    marked: list[tuple[int, int]] | None
    """Characters of `full` inside generation markers, where the template has them."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.prompt, self.full) if self.probe is None else (self.prompt, self.full, self.probe)


@dataclass(frozen=True)
class MaskRule:
    """Which answers are supervised, and how much of them.

    Args:
        supervise: all assistant turns or only the last.
        thinking: whether the reasoning part of an answer is supervised.
    """

    supervise: Literal["all_turns", "last_turn"] = "all_turns"
    thinking: Literal["keep", "drop"] = "keep"

    def apply(
        self, conversations: Sequence[Conversation], renderer: ChatRenderer
    ) -> list[list[MaskedTokens] | UnusableConversation]:
        """Samples of each conversation, or why it has none. All of their texts are tokenised in one call."""
        results: list[list[_Turn] | UnusableConversation] = []
        for conversation in conversations:
            try:
                results.append(list(self._turns(conversation, renderer)))
            except (TemplateRefusal, UnusableConversation) as error:
                results.append(UnusableConversation(str(error)))
        texts = dict.fromkeys(
            text for r in results if isinstance(r, list) for turn in r for text in turn.texts
        )
        tokens = dict(zip(texts, renderer.encode(list(texts)), strict=True))
        return [_samples(r, tokens, renderer) if isinstance(r, list) else r for r in results]

    def _turns(self, conversation: Conversation, renderer: ChatRenderer) -> Iterator[_Turn]:
        messages, tools = conversation.messages, conversation.tools
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise UnusableConversation(NO_ANSWER)
        for i in answers[-1:] if self.supervise == "last_turn" else answers:
            prompt = renderer.render(messages[:i], tools, generation_prompt=True)
            through, marked = messages[: i + 1], None
            if renderer.marks_generation:
                full, marked = renderer.marked(through, tools)
            else:
                full = renderer.render(through, tools, generation_prompt=False)
            if not full.startswith(prompt):
                raise UnusableConversation(
                    f"{renderer.name} prompts for message {i + 1} with {_tail(prompt)!r}, but renders the "
                    "answer behind another prefix: does data.enable_thinking fit the reasoning in the row?"
                )
            probe = None
            if self.thinking == "drop":
                probe = renderer.render(_probe(through), tools, generation_prompt=False)
            yield _Turn(i, prompt, full, probe, marked)


def _tail(text: str, length: int = 40) -> str:
    return text if len(text) <= length else "…" + text[-length:]


def _probe(messages: Messages) -> Messages:
    """The same reasoning before another answer: the two renderings part where the answer begins."""
    last = messages[-1]
    reasoning, end, answer = last["content"].rpartition(INLINE_REASONING_END)
    space = answer[: len(answer) - len(answer.lstrip())]
    other = "b" if answer.lstrip()[:1].lower() == "a" else "a"
    return [*messages[:-1], {**last, "content": reasoning + end + space + other}]


def _starts_with(tokens: list[int], prefix: list[int]) -> bool:
    return tokens[: len(prefix)] == prefix


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _behind(turn: _Turn, text: str, tokens: Mapping[str, Encoded], renderer: ChatRenderer) -> Encoded:
    """Tokens of `text` whose first ones are exactly the prompt's."""
    prompt = tokens[turn.prompt].ids
    if _starts_with(tokens[text].ids, prompt):
        return tokens[text]
    # A token lies across the seam of prompt and answer. A server's prompt cannot hold it.
    (answer,) = renderer.tokenize([text[len(turn.prompt) :]])
    return Encoded(prompt + answer, None)


def _samples(
    turns: Sequence[_Turn], tokens: Mapping[str, Encoded], renderer: ChatRenderer
) -> list[MaskedTokens]:
    """Join turns while the tokens so far are a prefix of the next turn's prompt."""
    samples: list[MaskedTokens] = []
    for turn in turns:
        prompt, full = tokens[turn.prompt].ids, _behind(turn, turn.full, tokens, renderer)
        answer = _answer_mask(turn, full, len(prompt), renderer)
        if turn.probe is not None:
            probe = _behind(turn, turn.probe, tokens, renderer)
            reasoning = _common(full.ids, probe.ids) - len(prompt)
            answer[:reasoning] = [False] * reasoning
        mask = [False] * len(prompt) + answer
        if samples and _starts_with(prompt, samples[-1].input_ids):
            before = samples.pop().loss_mask
            mask[: len(before)] = before
        samples.append(MaskedTokens(turn.index, full.ids, mask))
    return samples


def _answer_mask(turn: _Turn, full: Encoded, prompt: int, renderer: ChatRenderer) -> list[bool]:
    """Supervision of the tokens of `full` behind the first `prompt` ones."""
    answer = full.ids[prompt:]
    if turn.marked is not None and full.offsets is not None:
        mask = [
            any(start < until and stop > since for since, until in turn.marked)
            for start, stop in full.offsets[prompt:]
        ]
        last = max((i for i, flag in enumerate(mask) if flag), default=-1)
        # Markers that stop short of the end of turn: the draft must still learn to end.
        if 0 <= last < len(mask) - 1 and answer[last + 1] in renderer.special_ids:
            mask[last + 1] = True
        return mask
    end = max((i + 1 for i, token in enumerate(answer) if token in renderer.special_ids), default=len(answer))
    if renderer.decode(answer[end:]).strip():
        end = len(answer)
    return [i < end for i in range(len(answer))]
