from collections.abc import Callable
from pathlib import Path

import pytest

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.evaluation import follow_up, load_eval_prompts

WriteRows = Callable[..., Path]

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "there"},
    {"role": "user", "content": "how are you?"},
    {"role": "assistant", "content": "well"},
]


def test_a_chat_ends_where_the_assistant_answers(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    (prompt,) = load_eval_prompts([str(write_rows({"messages": CHAT}))], renderer)
    assert prompt.sample_id == "rows.jsonl:1"
    assert renderer.decode(prompt.input_ids.tolist()) == renderer.render(CHAT[:3], generation_prompt=True)


def test_an_open_chat_goes_on_with_the_targets_answers(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    (prompt,) = load_eval_prompts([str(write_rows({"turns": ["hello", "how are you?", "bye"]}))], renderer)
    assert renderer.decode(prompt.input_ids.tolist()) == renderer.render(CHAT[:1], generation_prompt=True)
    second = follow_up(prompt, "there", renderer)
    assert second is not None
    assert second.sample_id == "rows.jsonl:1#2"
    assert renderer.decode(second.input_ids.tolist()) == renderer.render(CHAT[:3], generation_prompt=True)
    third = follow_up(second, "well", renderer)
    assert third is not None
    assert third.sample_id == "rows.jsonl:1#3"
    bye = [*CHAT, {"role": "user", "content": "bye"}]
    assert renderer.decode(third.input_ids.tolist()) == renderer.render(bye, generation_prompt=True)
    assert follow_up(third, "bye", renderer) is None


def test_nothing_follows_a_chat_that_has_its_answers(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    files = [
        str(write_rows(row, name=name)) for name, row in (("a", {"messages": CHAT}), ("b", {"text": "c"}))
    ]
    assert [follow_up(prompt, "x", renderer) for prompt in load_eval_prompts(files, renderer)] == [None, None]


@pytest.mark.parametrize(
    ("mask", "length"),
    [([0, 0, 1, 1, 0], 2), ([0, 1, 0, 1, 1], 3), ([0, 0, 0, 0, 0], 5), ([0, 0, 0, 0, 1], 4)],
)
def test_a_token_row_ends_before_its_last_supervised_run(
    mask: list[int], length: int, renderer: ChatRenderer, write_rows: WriteRows
) -> None:
    path = write_rows({"input_ids": [5, 6, 7, 8, 9], "loss_mask": mask})
    (prompt,) = load_eval_prompts([str(path)], renderer)
    assert prompt.input_ids.tolist() == [5, 6, 7, 8, 9][:length]


def test_text_is_taken_whole(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    (prompt,) = load_eval_prompts([str(write_rows({"text": "hello there"}))], renderer)
    assert renderer.decode(prompt.input_ids.tolist()) == "hello there"


def test_prompts_are_counted_a_file(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    files = [
        str(write_rows(*[{"text": f"hello {i}"} for i in range(5)], "{", name=name)) for name in ("a", "b")
    ]
    found = load_eval_prompts(files, renderer, max_prompts=2)
    assert [prompt.sample_id for prompt in found] == ["a:1", "a:2", "b:1", "b:2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "not valid JSON"),
        ({"messages": CHAT[1:2]}, "no user turn"),
        ({"messages": [{"role": "user"}, {"content": "a"}]}, "no 'role'"),
    ],
)
def test_a_row_without_prompt_is_an_error(
    row: object, reason: str, renderer: ChatRenderer, write_rows: WriteRows
) -> None:
    path = write_rows({"messages": CHAT}, row)
    with pytest.raises(ValueError, match=rf"evaluation\.prompts: .*rows\.jsonl:2: .*{reason}"):
        load_eval_prompts([str(path)], renderer)


def test_an_empty_prompt_is_an_error(renderer: ChatRenderer, write_rows: WriteRows) -> None:
    path = write_rows({"input_ids": [5, 6], "loss_mask": [1, 1]})
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: an empty prompt"):
        load_eval_prompts([str(path)], renderer)
