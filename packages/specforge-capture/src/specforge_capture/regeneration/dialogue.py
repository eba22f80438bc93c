"""Which turns of a conversation the target writes, and what each of them is prompted with.

An assistant turn behind a user's is written anew; later turns are prompted with the new answer, never with
the old one. Kept as they are:

- system, user and tool messages;
- an assistant turn that calls tools, its reasoning included: the results behind it answer that very call;
- an assistant turn before any user's, which answers nothing.

A user or tool message that no assistant turn follows gets an answer too, so rows of user turns alone become
conversations.

An answer is the target's text as it is, reasoning included, in the message's `content`. A prompt is the
rendering of the messages before the answer, which is also what training renders: the two see the same prefix.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from specforge_capture.prompts.chat import ChatRenderer, Messages, Tools
from specforge_capture.prompts.sources import Conversation
from specforge_capture.targets.batch import Answer, Request


def script_of(messages: Messages) -> list[dict[str, Any] | None]:
    """The messages that stay, and None where the target writes."""
    script: list[dict[str, Any] | None] = []
    asked = False
    for message, after in zip(messages, [*messages[1:], None], strict=True):
        role = message["role"]
        if role == "assistant" and asked and not message.get("tool_calls"):
            if script[-1] is not None:
                script.append(None)
            continue
        script.append(message)
        asked = asked or role == "user"
        if role in ("user", "tool") and asked and (after is None or after["role"] == "user"):
            script.append(None)
    return script


@dataclass
class Dialogue:
    """One row on its way through its turns."""

    index: int
    """Place of the row among all rows."""
    sample_id: str
    """`file:line` of the row."""
    script: list[dict[str, Any] | None]
    tools: Tools
    messages: Messages = field(default_factory=list)
    """The conversation so far."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each answer, the stop token included."""
    finish: Literal["stop", "length"] = "stop"
    """`length` if the last answer was cut, which ends the conversation."""
    exact: bool = True
    """Whether each answer's text gives the very tokens again that the target wrote."""

    @classmethod
    def of(cls, index: int, sample_id: str, row: Conversation) -> "Dialogue":
        """The dialogue of a row of a prompt file.

        Raises:
            ValueError: if there is nothing to answer.
        """
        script = script_of(row.messages)
        if None not in script:
            raise ValueError("nothing to answer: no user turn, or answers that only call tools")
        return cls(index, sample_id, script, row.tools)

    def next_request(self, renderer: ChatRenderer, max_length: int, max_new_tokens: int) -> Request | None:
        """What the target is asked next; None when the conversation is at its end.

        Args:
            renderer: the target's chat template.
            max_length: limit of the whole conversation in tokens.
            max_new_tokens: limit of an answer.

        Raises:
            ValueError: if the template refuses the conversation, or the first prompt leaves no room.
        """
        if self.finish == "length" or len(self.messages) == len(self.script):
            return None
        while (message := self.script[len(self.messages)]) is not None:
            self.messages.append(message)
            if len(self.messages) == len(self.script):
                return None
        prompt = self._prompt(renderer)
        room = max_length - len(prompt)
        if room < 1:
            if not self.lengths:
                raise ValueError(
                    f"the prompt takes {len(prompt)} tokens, required less than data.max_length={max_length}"
                )
            self.finish = "length"
            self._drop_unanswered()
            return None
        return Request((self.index, len(self.lengths)), prompt, min(room, max_new_tokens))

    def add(self, request: Request, answer: Answer, renderer: ChatRenderer) -> None:
        """Append an answer to the conversation."""
        stopped = answer.finish == "stop"
        said = answer.tokens[:-1] if stopped else answer.tokens
        self.messages.append({"role": "assistant", "content": renderer.decode(said)})
        self.lengths.append(len(answer.tokens))
        self.finish = answer.finish
        again = renderer.tokenize([renderer.render(self.messages, self.tools, generation_prompt=False)])[0]
        written = request.prompt + said
        self.exact = self.exact and again[: len(written)] == written
        if not stopped:
            self._drop_unanswered()

    def _prompt(self, renderer: ChatRenderer) -> list[int]:
        return renderer.tokenize([renderer.render(self.messages, self.tools, generation_prompt=True)])[0]

    def _drop_unanswered(self) -> None:
        """End the conversation with its last answer."""
        while self.messages[-1]["role"] != "assistant":
            self.messages.pop()

    def to_json(self) -> dict[str, Any]:
        """The row as it is written, a `messages` row with notes."""
        tools = {"tools": self.tools} if self.tools else {}
        return {
            "id": self.sample_id,
            "messages": self.messages,
            **tools,
            "finish": self.finish,
            "answer_tokens": self.lengths,
            "exact": self.exact,
        }
