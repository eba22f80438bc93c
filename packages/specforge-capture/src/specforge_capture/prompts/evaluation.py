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
    input_ids: Tensor
    """[S] int64."""


def load_eval_prompts(
    files: Sequence[str], renderer: ChatRenderer, max_prompts: int | None = None
) -> list[EvalPrompt]:
    """Read the prompts of evaluation files.

    A chat is rendered up to its last user turn, with the generation prompt; a pre-tokenised row ends where
    its last supervised run begins; a text is taken whole.

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
            ids = _prompt_ids(path, row, renderer)
            if not ids:
                raise ValueError(f"evaluation.prompts: {path}:{row.line}: an empty prompt")
            prompts.append(EvalPrompt(f"{path.name}:{row.line}", torch.tensor(ids, dtype=torch.int64)))
    return prompts


def _rows(path: Path) -> Iterator[SourceRow]:
    for rows, _ in read_rows(path, detect_format(path)):
        yield from rows


def _prompt_ids(path: Path, row: SourceRow, renderer: ChatRenderer) -> list[int]:
    match row:
        case Conversation():
            users = [i for i, message in enumerate(row.messages) if message["role"] == "user"]
            if not users:
                raise ValueError(f"evaluation.prompts: {path}:{row.line}: no user turn")
            try:
                text = renderer.render(row.messages[: users[-1] + 1], row.tools, generation_prompt=True)
            except TemplateRefusal as refusal:
                raise ValueError(f"evaluation.prompts: {path}:{row.line}: {refusal}") from refusal
            return renderer.tokenize([text])[0]
        case Text():
            return renderer.tokenize([row.text], add_special_tokens=True)[0]
        case Tokens():
            mask = row.loss_mask
            last = len(mask)
            if mask.any():
                end = int(mask.nonzero()[0][-1])
                unsupervised = (~mask[:end]).nonzero()[0]
                last = int(unsupervised[-1]) + 1 if len(unsupervised) else 0
            return row.input_ids[:last].tolist()
    raise ValueError(f"evaluation.prompts: {path}:{row.line}: {row.reason}")
