from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.samples import PromptReport, Sample, SampleReader
from specforge_config.data import DataConfig

WriteRows = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]

VOCABULARY = 320
ALTERNATING = """\
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate') -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
USER, ASSISTANT = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}
GOOD = {"messages": [USER, ASSISTANT]}


def read(data: DataConfig, renderer: ChatRenderer, mask: int | None = 3) -> tuple[list[Sample], PromptReport]:
    reader = SampleReader(data, renderer, VOCABULARY, mask)
    return list(reader.samples()), reader.report


def tokens(ids: list[int], mask: list[int] | None = None) -> dict[str, Any]:
    return {"input_ids": ids, "loss_mask": mask or [1] * len(ids)}


@pytest.fixture
def one_starts_with_the_assistant(write_rows: WriteRows) -> Path:
    return write_rows(GOOD, {"messages": [ASSISTANT, USER, ASSISTANT]}, GOOD)


def test_a_row_that_the_template_refuses_is_dropped_and_reported(
    one_starts_with_the_assistant: Path, with_template: Callable[..., ChatRenderer], data_config: MakeConfig
) -> None:
    samples, report = read(data_config(one_starts_with_the_assistant), with_template(ALTERNATING))
    assert [sample.sample_id for sample in samples] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert (report.rows, report.kept) == (3, 2)
    assert "1 dropped: row 2, " in str(report)
    assert "roles must alternate" in str(report)


def test_strict_makes_it_an_error(
    one_starts_with_the_assistant: Path, with_template: Callable[..., ChatRenderer], data_config: MakeConfig
) -> None:
    with pytest.raises(ValueError, match=r"data\.strict: .*rows\.jsonl:2: .*roles must alternate"):
        read(data_config(one_starts_with_the_assistant, strict=True), with_template(ALTERNATING))


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        (tokens([5]), {}, "1 tokens, required at least two"),
        (tokens([5, 320]), {}, "token 320 outside the target's vocabulary of 320"),
        (tokens([5, -1]), {}, "token -1 outside the target's vocabulary of 320"),
        (tokens([5, 3]), {}, "holds the draft's mask token 3"),
        (tokens([5, 6], [0, 0]), {}, "no supervised token (the chat template of tiny)"),
        (tokens([5] * 9, [0] * 8 + [1]), {"max_length": 8}, "no supervised token in the first data.max_len"),
        (tokens([5] * 9), {"max_length": 8, "overlong": "drop"}, "9 tokens, above data.max_length=8"),
    ],
)
def test_rows_that_cannot_be_trained_on(
    row: dict[str, Any],
    settings: dict[str, Any],
    reason: str,
    renderer: ChatRenderer,
    write_rows: WriteRows,
    data_config: MakeConfig,
) -> None:
    samples, report = read(data_config(write_rows(tokens([5, 6]), row), **settings), renderer)
    assert [sample.sample_id for sample in samples] == ["rows.jsonl:1"]
    (dropped,) = report.dropped
    assert (dropped.file, dropped.line) == ("rows.jsonl", 2)
    assert reason in dropped.reason


def test_long_rows_are_cut(renderer: ChatRenderer, write_rows: WriteRows, data_config: MakeConfig) -> None:
    (sample,), report = read(data_config(write_rows(tokens(list(range(4, 24)))), max_length=8), renderer)
    assert sample.input_ids.tolist() == list(range(4, 12))
    assert len(sample.loss_mask) == 8
    assert report.truncated == 1


def test_plain_text_is_supervised_whole(
    renderer: ChatRenderer, write_rows: WriteRows, data_config: MakeConfig
) -> None:
    (sample,), _ = read(data_config(write_rows({"text": "hello there"})), renderer)
    assert renderer.decode(sample.input_ids.tolist()) == "hello there"
    assert sample.loss_mask.all()


def test_files_of_several_forms_join(
    renderer: ChatRenderer, write_rows: WriteRows, data_config: MakeConfig
) -> None:
    files = [write_rows(GOOD, name="a.jsonl"), write_rows(tokens([5, 6]), name="b.jsonl")]
    seen: list[tuple[int, float]] = []
    reader = SampleReader(data_config(*files), renderer, VOCABULARY, None)
    found = [sample.sample_id for sample in reader.samples(lambda rows, share: seen.append((rows, share)))]
    assert found == ["a.jsonl:1", "b.jsonl:1"]
    assert [rows for rows, _ in seen] == [1, 2]
    assert 0 < seen[0][1] < seen[1][1] == 1


def test_reports_survive_json(renderer: ChatRenderer, write_rows: WriteRows, data_config: MakeConfig) -> None:
    _, report = read(data_config(write_rows(GOOD, {"messages": [USER]})), renderer)
    assert PromptReport.from_json(report.to_json()) == report
    assert report.reasons() == {"no assistant turn": 1}
