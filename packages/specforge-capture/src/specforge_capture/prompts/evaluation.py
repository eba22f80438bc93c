"""Prompts for evaluation: conversations up to the point where the assistant answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specforge_capture.prompts.chat import ChatRenderer, TemplateRefusal
from specforge_capture.prompts.sources import Conversation, SourceRow, Text, Tokens, detect_format, read_rows


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt that is decoded."""

    sample_id: str
    """`file:line`, with `#turn` from the second turn on."""
    input_ids: Tensor
    """[S] int64."""
    chat: Conversation | None = None
    """What the prompt was rendered from, and what the user says after the answer."""
    turn: int = 0
    """Index in `chat.messages` of the user turn that the prompt ends with."""


def load_eval_prompts(
    files: Sequence[str], renderer: ChatRenderer, max_prompts: int | None = None
) -> list[EvalPrompt]:
    """Read the prompts of evaluation files.

    A chat is rendered up to its first user turn that another one follows, else up to its last user turn, with
    the generation prompt; a pre-tokenised row ends where its last supervised run begins; a text is taken
    whole.

    Args:
        files: JSONL or Parquet files.
        renderer: tokenizer and chat template.
        max_prompts: prompts taken from the start of each file.

    Raises:
        ValueError: for a row that gives no prompt, naming file and line.
    """
    prompts: list[EvalPrompt] = []
    for path in map(Path, files):
        for taken, row in enumerate(_rows(path)):
            if taken == max_prompts:
                break
            prompts.append(_prompt(path, row, renderer))
    return prompts


def follow_up(prompt: EvalPrompt, answer: str, renderer: ChatRenderer) -> EvalPrompt | None:
    """The next turn of an open chat, once the target has answered; None where the user says no more.

    Raises:
        ValueError: if the template refuses the longer chat.
    """
    chat, after = prompt.chat, prompt.turn + 1
    if chat is None or after == len(chat.messages):
        return None
    messages = [*chat.messages[:after], {"role": "assistant", "content": answer}, *chat.messages[after:]]
    said = sum(message["role"] == "user" for message in messages[: after + 2])
    name = f"{prompt.sample_id.partition('#')[0]}#{said}"
    return _chat_prompt(name, Conversation(chat.line, messages, chat.tools), renderer)


def _rows(path: Path) -> Iterator[SourceRow]:
    for rows, _ in read_rows(path, detect_format(path)):
        yield from rows


def _prompt(path: Path, row: SourceRow, renderer: ChatRenderer) -> EvalPrompt:
    sample_id = f"{path.name}:{row.line}"
    match row:
        case Conversation():
            return _chat_prompt(sample_id, row, renderer)
        case Text():
            ids = renderer.tokenize([row.text], add_special_tokens=True)[0]
        case Tokens():
            mask = row.loss_mask
            last = len(mask)
            if mask.any():
                end = int(mask.nonzero()[0][-1])
                unsupervised = (~mask[:end]).nonzero()[0]
                last = int(unsupervised[-1]) + 1 if len(unsupervised) else 0
            ids = row.input_ids[:last].tolist()
        case _:
            raise ValueError(f"evaluation.prompts: {path}:{row.line}: {row.reason}")
    if not ids:
        raise ValueError(f"evaluation.prompts: {path}:{row.line}: an empty prompt")
    return EvalPrompt(sample_id, torch.tensor(ids, dtype=torch.int64))


def _chat_prompt(sample_id: str, chat: Conversation, renderer: ChatRenderer) -> EvalPrompt:
    users = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
    if not users:
        raise ValueError(f"evaluation.prompts: {sample_id}: no user turn")
    turn = next((user for user in users if user + 1 in users), users[-1])
    try:
        text = renderer.render(chat.messages[: turn + 1], chat.tools, generation_prompt=True)
    except TemplateRefusal as refusal:
        raise ValueError(f"evaluation.prompts: {sample_id}: {refusal}") from refusal
    if turn == users[-1]:  # what follows is an answer that the file brought along
        chat = Conversation(chat.line, chat.messages[: turn + 1], chat.tools)
    return EvalPrompt(sample_id, torch.tensor(renderer.tokenize([text])[0], dtype=torch.int64), chat, turn)
