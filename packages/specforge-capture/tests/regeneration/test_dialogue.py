from typing import Any

import pytest

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.sources import Conversation
from specforge_capture.regeneration.dialogue import Dialogue, script_of
from specforge_capture.targets.batch import Answer, Request

END = 2
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


def said(role: str, content: str = "x") -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM, USER, OLD, RESULT = said("system"), said("user"), said("assistant", "old"), said("tool")


@pytest.mark.parametrize(
    ("messages", "script"),
    [
        ([USER], [USER, None]),
        ([USER, USER], [USER, None, USER, None]),
        ([SYSTEM, USER, OLD, USER, OLD], [SYSTEM, USER, None, USER, None]),
        ([USER, OLD, USER], [USER, None, USER, None]),
        ([USER, OLD, OLD, USER], [USER, None, USER, None]),
        ([USER, CALL, RESULT, OLD], [USER, CALL, RESULT, None]),
        ([USER, CALL, RESULT, RESULT], [USER, CALL, RESULT, RESULT, None]),
        ([OLD, USER, OLD], [OLD, USER, None]),
        ([SYSTEM], [SYSTEM]),
        ([USER, CALL], [USER, CALL]),
    ],
)
def test_turns_behind_a_user_are_written_anew(
    messages: list[dict[str, Any]], script: list[dict[str, Any] | None]
) -> None:
    assert script_of(messages) == script


def dialogue(*messages: dict[str, Any]) -> Dialogue:
    return Dialogue.of(3, "rows.jsonl:4", Conversation(4, list(messages)))


def answer(found: Dialogue, renderer: ChatRenderer, text: str, finish: Any = "stop") -> Request:
    """Let the target write `text`; the request it answered."""
    request = found.next_request(renderer, 500, 50)
    assert request is not None
    tokens = renderer.tokenize([text])[0]
    found.add(request, Answer([*tokens, END] if finish == "stop" else tokens, finish), renderer)
    return request


def test_each_turn_is_prompted_with_the_new_answers(renderer: ChatRenderer) -> None:
    found = dialogue(SYSTEM, said("user", "one"), OLD, said("user", "two"), OLD)
    first = answer(found, renderer, "new")
    second = answer(found, renderer, "newer")
    assert (first.key, second.key) == ((3, 0), (3, 1))
    chat = [SYSTEM, said("user", "one"), said("assistant", "new"), said("user", "two")]
    assert renderer.decode(second.prompt) == renderer.render(chat, generation_prompt=True)
    assert found.next_request(renderer, 500, 50) is None
    assert found.to_json() == {
        "id": "rows.jsonl:4",
        "messages": [*chat, said("assistant", "newer")],
        "finish": "stop",
        "answer_tokens": [len(renderer.tokenize([text])[0]) + 1 for text in ("new", "newer")],
        "exact": True,
    }


def test_reasoning_and_tool_turns_are_kept(renderer: ChatRenderer) -> None:
    call = {**CALL, "reasoning_content": "I need f"}
    found = Dialogue.of(0, "a", Conversation(1, [USER, call, RESULT], tools=[{"name": "f"}]))
    answer(found, renderer, "<think>\nso\n</think>\n\nit is x")
    written = found.to_json()
    assert written["messages"][1:3] == [call, RESULT]
    assert written["messages"][3]["content"] == "<think>\nso\n</think>\n\nit is x"
    assert written["tools"] == [{"name": "f"}]


def test_a_cut_answer_ends_the_conversation(renderer: ChatRenderer) -> None:
    found = dialogue(USER, USER)
    answer(found, renderer, "cut", finish="length")
    assert found.next_request(renderer, 500, 50) is None
    assert found.to_json()["messages"] == [USER, said("assistant", "cut")]
    assert found.to_json()["finish"] == "length"


def test_the_whole_conversation_stays_within_max_length(renderer: ChatRenderer) -> None:
    found = dialogue(USER, said("user", "second"))
    prompt = len(renderer.tokenize([renderer.render([USER], generation_prompt=True)])[0])
    request = found.next_request(renderer, prompt + 6, 50)
    assert request is not None
    assert request.limit == 6
    found.add(request, Answer([20, 21, END], "stop"), renderer)
    assert found.next_request(renderer, prompt + 6, 50) is None
    assert found.to_json()["finish"] == "length"
    assert [message["role"] for message in found.messages] == ["user", "assistant"]
    with pytest.raises(ValueError, match=f"the prompt takes {prompt} tokens, required less than"):
        dialogue(USER).next_request(renderer, prompt, 50)


def test_an_answer_that_tokenises_otherwise_is_noted(renderer: ChatRenderer) -> None:
    found = dialogue(USER)
    request = found.next_request(renderer, 500, 50)
    assert request is not None
    # The two halves of a token that the tokenizer would never split.
    (joined,) = renderer.tokenize(["hello"])
    letters = [renderer.tokenize([letter])[0][0] for letter in "hello"]
    assert joined != letters
    found.add(request, Answer([*letters, END], "stop"), renderer)
    assert found.messages[-1]["content"] == "hello"
    assert not found.to_json()["exact"]


@pytest.mark.parametrize("messages", [[SYSTEM], [OLD], [USER, CALL]])
def test_a_row_without_a_turn_to_write_is_refused(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="nothing to answer"):
        dialogue(*messages)
