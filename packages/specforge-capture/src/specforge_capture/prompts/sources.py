"""Prompt files, read as a stream of row batches: JSONL and Parquet, in five row forms.

| form | keys |
|---|---|
| `messages` | `messages`: OpenAI chat messages; optional `tools` |
| `sharegpt` | `conversations`: `{"from": …, "value": …}` turns; optional `system`, `tools` |
| `turns` | `turns`: what the user says, turn by turn; answers are the target's to give |
| `text` | `text`: plain text |
| `tokens` | `input_ids`, `loss_mask`: equally long lists |

Invariant: memory is bounded by one batch, and a row that cannot be used becomes a `Rejected` with its line,
    never an exception, so that the caller decides between dropping and failing. Lines count from 1; a Parquet
    row's line is its ordinal.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Format = Literal["messages", "sharegpt", "turns", "text", "tokens"]

_KEYS: dict[Format, str] = {
    "tokens": "input_ids",
    "messages": "messages",
    "sharegpt": "conversations",
    "turns": "turns",
    "text": "text",
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# Bytes of JSONL parsed at once. Chats grow when each turn's prefix is rendered; token lists shrink.
_CHAT_BYTES = 1 << 18
_TOKEN_BYTES = 8 << 20
_PARQUET_ROWS = 256
_PLAIN_TOKENS = re.compile(
    rb'\s*\{\s*"input_ids"\s*:\s*\[([0-9, ]+)\]\s*,\s*"loss_mask"\s*:\s*\[([01, ]+)\]\s*\}\s*'
)


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used."""

    line: int
    reason: str


@dataclass(frozen=True)
class Conversation:
    """A chat: OpenAI messages and the tools that the template is told of."""

    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Text:
    """A plain document."""

    line: int
    text: str


@dataclass(frozen=True)
class Tokens:
    """A pre-tokenised row."""

    line: int
    input_ids: np.ndarray
    """[S] int64."""
    loss_mask: np.ndarray
    """[S] bool."""


SourceRow = Conversation | Text | Tokens | Rejected


class _RowError(ValueError):
    """What is wrong with one row."""


def detect_format(path: Path) -> Format:
    """The form of a file's first row.

    Raises:
        ValueError: if the file is missing or empty, or its first row is in none of the forms.
    """
    keys = _first_keys(path)
    for form, key in _KEYS.items():
        if key in keys:
            return form
    raise ValueError(
        f"{path}:1: keys {sorted(keys)} are no known row form; required one of {sorted(_KEYS.values())}"
    )


def _first_keys(path: Path) -> set[str]:
    if not path.is_file():
        raise ValueError(f"{path}: no such prompt file")
    if path.suffix == ".parquet":
        return set(_open_parquet(path).schema_arrow.names)
    for lines, _ in _line_batches(path, 1):
        for number, line in lines:
            try:
                return set(_json_object(line))
            except _RowError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    raise ValueError(f"{path}: holds no rows")


def read_rows(path: Path, form: Format) -> Iterator[tuple[list[SourceRow], float]]:
    """Stream a prompt file in batches.

    Args:
        path: a Parquet file (by its suffix) or JSONL.
        form: the form of its rows.

    Yields:
        The rows of a batch in file order, and the share of the file read so far.

    Raises:
        ValueError: if the file is no Parquet although named so, or lacks the form's column.
    """
    if path.suffix == ".parquet":
        yield from _read_parquet(path, form)
    elif form == "tokens":
        for lines, share in _line_batches(path, _TOKEN_BYTES):
            yield [_token_line(number, line) for number, line in lines], share
    else:
        for lines, share in _line_batches(path, _CHAT_BYTES):
            yield [_row(number, line, form) for number, line in lines], share


def _line_batches(path: Path, size: int) -> Iterator[tuple[list[tuple[int, bytes]], float]]:
    """Numbered non-blank lines, about `size` bytes at a time, and the share of the file read."""
    total = path.stat().st_size
    number = 1
    with path.open("rb") as file:
        while chunk := file.readlines(size):
            yield (
                [(n, line) for n, line in enumerate(chunk, number) if not line.isspace()],
                file.tell() / total,
            )
            number += len(chunk)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _RowError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise _RowError(f"a JSON {type(value).__name__}, required one object a line")
    return value


def _row(line: int, content: bytes | dict[str, Any], form: Format) -> SourceRow:
    try:
        value = content if isinstance(content, dict) else _json_object(content)
        if value.get(_KEYS[form]) is None:
            raise _RowError(f"no {_KEYS[form]!r} in a row of the form {form!r}; found {sorted(value)}")
        return _PARSERS[form](line, value)
    except _RowError as error:
        return Rejected(line, str(error))


def _messages(line: int, value: dict[str, Any]) -> Conversation:
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _RowError("'messages' is not a non-empty list of objects")
    return Conversation(line, [_message(message) for message in messages], value.get("tools") or None)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """One message without absent fields, its content as one string."""
    message = {key: field for key, field in message.items() if field is not None}
    if not isinstance(message.get("role"), str):
        raise _RowError("a message has no 'role'")
    content = message.get("content", "")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _RowError("a message's content holds parts that are not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _RowError(f"a message's content is a {type(content).__name__}, required text")
    return {**message, "content": content}


def _sharegpt(line: int, value: dict[str, Any]) -> Conversation:
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        raise _RowError("'conversations' is not a non-empty list of objects")
    messages = []
    if value.get("system"):
        messages.append({"role": "system", "content": value["system"]})
    for turn in turns:
        if turn.get("from") not in _SHAREGPT_ROLES:
            raise _RowError(
                f"a turn is 'from' {turn.get('from')!r}, required one of {sorted(_SHAREGPT_ROLES)}"
            )
        messages.append({"role": _SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")})
    return Conversation(line, [_message(message) for message in messages], value.get("tools") or None)


def _turns(line: int, value: dict[str, Any]) -> Conversation:
    turns = value["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise _RowError("'turns' is not a non-empty list of strings")
    return Conversation(line, [{"role": "user", "content": turn} for turn in turns])


def _text(line: int, value: dict[str, Any]) -> Text:
    if not isinstance(value["text"], str):
        raise _RowError(f"'text' is a {type(value['text']).__name__}, required a string")
    return Text(line, value["text"])


def _tokens(line: int, value: dict[str, Any]) -> Tokens:
    ids, mask = value["input_ids"], value.get("loss_mask")
    tokens = _array(ids)
    if tokens is None or tokens.dtype.kind != "i":
        raise _RowError("'input_ids' is not a list of integers")
    flags = _array(mask)
    if flags is None or not np.isin(flags, (0, 1)).all():
        raise _RowError("'loss_mask' is not a list of 0 and 1")
    if len(tokens) != len(flags):
        raise _RowError(f"{len(tokens)} input_ids, but {len(flags)} entries in loss_mask")
    return Tokens(line, tokens, flags.astype(bool))


def _array(value: object) -> np.ndarray | None:
    """A flat list of numbers as an array; None for anything else."""
    if not isinstance(value, list):
        return None
    try:
        array = np.array(value) if value else np.zeros(0, dtype=np.int64)
    except ValueError:
        return None
    return array if array.ndim == 1 and array.dtype.kind in "bif" else None


_PARSERS = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "turns": _turns,
    "text": _text,
    "tokens": _tokens,
}


def _token_line(line: int, content: bytes) -> SourceRow:
    """One pre-tokenised line. Lines of nothing but the two lists are read by numpy, ten times as fast as by
    a JSON parser; all others by the parser, which also finds what is wrong."""
    if match := _PLAIN_TOKENS.fullmatch(content):
        ids, mask = match.groups()
        flags = np.frombuffer(mask.translate(None, b", "), dtype=np.uint8) == ord("1")
        try:
            tokens = np.fromstring(ids, dtype=np.int64, sep=",")
        except ValueError:
            return _row(line, content, "tokens")
        if len(tokens) == len(flags) == ids.count(b",") + 1 == mask.count(b",") + 1:
            return Tokens(line, tokens, flags)
    return _row(line, content, "tokens")


def _token_columns(ids: pa.ListArray, mask: pa.ListArray, lines: Sequence[int]) -> list[SourceRow] | None:
    """Rows as views of two list columns; None if any of them is malformed."""
    if ids.null_count or mask.null_count or len(ids) != len(lines) or not ids.offsets.equals(mask.offsets):
        return None
    tokens, flags = ids.values, mask.values
    if tokens.null_count or flags.null_count or not pa.types.is_integer(tokens.type):
        return None
    values, supervised = tokens.to_numpy(), flags.to_numpy(zero_copy_only=False)
    if supervised.size and not ((supervised == 0) | (supervised == 1)).all():
        return None
    supervised, offsets = supervised.astype(bool), ids.offsets.to_numpy()
    return [
        Tokens(line, values[start:stop], supervised[start:stop])
        for line, start, stop in zip(lines, offsets[:-1], offsets[1:], strict=True)
    ]


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from None


def _read_parquet(path: Path, form: Format) -> Iterator[tuple[list[SourceRow], float]]:
    with _open_parquet(path) as file:
        names = file.schema_arrow.names
        if _KEYS[form] not in names:
            raise ValueError(
                f"{path}: no column {_KEYS[form]!r} for the form {form!r}; found {sorted(names)}"
            )
        wanted = [name for name in (_KEYS[form], "loss_mask", "system", "tools") if name in names]
        number, total = 1, file.metadata.num_rows
        for batch in file.iter_batches(_PARQUET_ROWS, columns=wanted):
            lines = range(number, number + batch.num_rows)
            number += batch.num_rows
            rows = None
            if form == "tokens" and "loss_mask" in wanted:
                rows = _token_columns(batch["input_ids"], batch["loss_mask"], lines)
            yield (
                rows or [_row(n, r, form) for n, r in zip(lines, batch.to_pylist(), strict=True)],
                (number - 1) / total,
            )
