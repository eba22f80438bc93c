from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specforge_capture.prompts.sources import (
    Conversation,
    Rejected,
    SourceRow,
    Text,
    Tokens,
    detect_format,
    read_rows,
)

WriteRows = Callable[..., Path]

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]}
SHAREGPT = {
    "system": "be brief",
    "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "there"}],
}
TOKENS = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def rows_of(path: Path) -> list[SourceRow]:
    return [row for rows, _ in read_rows(path, detect_format(path)) for row in rows]


def as_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("row", "form"),
    [
        (CHAT, "messages"),
        (SHAREGPT, "sharegpt"),
        ({"turns": ["a"]}, "turns"),
        ({"text": "a"}, "text"),
        (TOKENS, "tokens"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_form_is_read_off_the_first_row(
    row: dict, form: str, suffix: str, write_rows: WriteRows, tmp_path: Path
) -> None:
    path = write_rows(row) if suffix == "jsonl" else as_parquet(tmp_path / "rows.parquet", [row])
    assert detect_format(path) == form
    assert not isinstance(rows_of(path)[0], Rejected)


def test_sharegpt_becomes_messages(write_rows: WriteRows) -> None:
    (row,) = rows_of(write_rows(SHAREGPT))
    assert isinstance(row, Conversation)
    assert row.messages == [{"role": "system", "content": "be brief"}, *CHAT["messages"]]


def test_turns_are_what_the_user_says(write_rows: WriteRows) -> None:
    (row,) = rows_of(write_rows({"turns": ["a", "b"]}))
    assert isinstance(row, Conversation)
    assert row.messages == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]


def test_a_turn_that_is_no_text_is_rejected(write_rows: WriteRows) -> None:
    _, row = rows_of(write_rows({"turns": ["a"]}, {"turns": ["a", 1]}))
    assert row == Rejected(2, "'turns' is not a non-empty list of strings")


def test_text_parts_are_joined_and_absent_fields_left_out(write_rows: WriteRows) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = rows_of(write_rows({"messages": [{"role": "user", "content": parts, "name": None}]}))
    assert isinstance(row, Conversation)
    assert row.messages == [{"role": "user", "content": "ab"}]


def test_parquet_messages_equal_jsonl_messages(write_rows: WriteRows, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "b", "reasoning_content": "r"}
    rows = [CHAT, {"messages": [{"role": "user", "content": "a"}, answer]}]
    assert rows_of(as_parquet(tmp_path / "rows.parquet", rows)) == rows_of(write_rows(*rows))


@pytest.mark.parametrize(
    "line",
    [
        '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}',
        '{"input_ids":[5,6,7],"loss_mask":[0,1,1]}',
        '{"loss_mask": [false, true, true], "input_ids": [5, 6, 7], "id": "x"}',
        '{"input_ids": [5, 6, 7], "loss_mask": [0.0, 1.0, 1.0]}',
    ],
)
def test_token_rows(line: str, write_rows: WriteRows) -> None:
    (row,) = rows_of(write_rows(line))
    assert isinstance(row, Tokens)
    assert row.input_ids.tolist() == [5, 6, 7]
    assert row.loss_mask.dtype == bool
    assert row.loss_mask.tolist() == [False, True, True]


def test_parquet_tokens_are_views_of_the_columns(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(n)), "loss_mask": [1] * n} for n in (3, 1, 4)]
    found = rows_of(as_parquet(tmp_path / "rows.parquet", rows))
    assert all(isinstance(row, Tokens) for row in found)
    assert [row.input_ids.tolist() for row in found if isinstance(row, Tokens)] == [
        [0, 1, 2],
        [0],
        [0, 1, 2, 3],
    ]
    assert [row.line for row in found] == [1, 2, 3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"input_ids": [5, 6], "loss_mask": [1]}', "2 input_ids, but 1 entries in loss_mask"),
        ('{"input_ids": [5, 6]}', "'loss_mask' is not a list of 0 and 1"),
        ('{"input_ids": [5, 6], "loss_mask": [1, 2]}', "'loss_mask' is not a list of 0 and 1"),
        ('{"input_ids": [5, 6.5], "loss_mask": [1, 1]}', "'input_ids' is not a list of integers"),
        ('{"input_ids": [5, "6"], "loss_mask": [1, 1]}', "'input_ids' is not a list of integers"),
        ('{"input_ids": [[5], 6], "loss_mask": [1, 1]}', "'input_ids' is not a list of integers"),
        ('{"input_ids": [5, 6 7], "loss_mask": [1, 1, 1]}', "not valid JSON"),
        ('{"messages": []}', "no 'input_ids' in a row of the form 'tokens'"),
        ("[1, 2]", "a JSON list"),
        ('{"input_ids": [5', "not valid JSON"),
    ],
)
def test_a_bad_token_row_is_rejected_by_line(line: str, reason: str, write_rows: WriteRows) -> None:
    found = rows_of(write_rows(TOKENS, "", line, TOKENS))
    assert [type(row) for row in found] == [Tokens, Rejected, Tokens]
    assert found[1].line == 3
    assert isinstance(found[1], Rejected)
    assert reason in found[1].reason


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": "hello"}, "'messages' is not a non-empty list"),
        ({"messages": []}, "'messages' is not a non-empty list"),
        ({"messages": [{"content": "a"}]}, "no 'role'"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "parts that are not text"),
        ({"text": "a"}, "no 'messages'"),
        ("{", "not valid JSON"),
    ],
)
def test_a_bad_chat_row_is_rejected_by_line(row: object, reason: str, write_rows: WriteRows) -> None:
    _, found = rows_of(write_rows(CHAT, row))
    assert isinstance(found, Rejected)
    assert (found.line, reason in found.reason) == (2, True), found


def test_unknown_speakers_are_rejected(write_rows: WriteRows) -> None:
    (row,) = rows_of(write_rows({"conversations": [{"from": "narrator", "value": "once"}]}))
    assert isinstance(row, Rejected)
    assert "'narrator'" in row.reason


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no rows"), ('{"prompt": "a"}\n', "keys \\['prompt'\\]"), ("{\n", ":1: not valid JSON")],
)
def test_files_without_a_known_form(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        detect_format(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such prompt file"):
        detect_format(tmp_path / "absent.jsonl")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ValueError, match="not a Parquet file"):
        detect_format(tmp_path / "text.parquet")


def test_a_long_file_comes_in_batches(write_rows: WriteRows) -> None:
    path = write_rows(*[{"text": "x" * 5000}] * 700)
    batches = list(read_rows(path, "text"))
    assert len(batches) > 2
    assert sum(len(rows) for rows, _ in batches) == 700
    shares = [share for _, share in batches]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert isinstance(batches[-1][0][-1], Text)
    assert batches[-1][0][-1].line == 700


def test_fast_and_general_token_parsing_agree(write_rows: WriteRows) -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"input_ids": rng.integers(0, 10**6, n).tolist(), "loss_mask": rng.integers(0, 2, n).tolist()}
        for n in (1, 17, 400)
    ]
    plain = rows_of(write_rows(*rows, name="plain.jsonl"))
    general = rows_of(write_rows(*[{**row, "id": "x"} for row in rows], name="general.jsonl"))
    for a, b in zip(plain, general, strict=True):
        assert isinstance(a, Tokens)
        assert isinstance(b, Tokens)
        assert np.array_equal(a.input_ids, b.input_ids)
        assert np.array_equal(a.loss_mask, b.loss_mask)
