from collections.abc import Callable
from typing import Any

import pytest

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.masks import MaskedTokens, MaskRule, UnusableConversation
from specforge_capture.prompts.sources import Conversation

MakeRenderer = Callable[..., ChatRenderer]

MARKED = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == ROLE -%}
{%- generation -%}{{- m.content -}}{%- endgeneration -%}
{%- else -%}
{{- m.content -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Reasoning stays only behind the last user message; without thinking, the prompt closes an empty block.
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- set parts = m.content.split('</think>') -%}
{%- set inline = parts[0].split('<think>')[-1].strip('\\n') if parts[1:] else '' -%}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\\n' + (m.reasoning_content or inline) + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- parts[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


TWO_TURNS = [user("hello"), assistant("hello there"), user("how are you?"), assistant("think about it")]


def samples_of(
    messages: list[dict[str, Any]], renderer: ChatRenderer, rule: MaskRule | None = None
) -> list[MaskedTokens]:
    (found,) = (rule or MaskRule()).apply([Conversation(1, messages)], renderer)
    assert not isinstance(found, UnusableConversation), found
    return found


def supervised(sample: MaskedTokens, renderer: ChatRenderer) -> list[str]:
    """The text of each supervised run."""
    runs: list[list[int]] = []
    for i, (token, flag) in enumerate(zip(sample.input_ids, sample.loss_mask, strict=True)):
        if flag and (i == 0 or not sample.loss_mask[i - 1]):
            runs.append([])
        if flag:
            runs[-1].append(token)
    return [renderer.decode(run) for run in runs]


def prompts_before_answers(sample: MaskedTokens) -> list[list[int]]:
    """The tokens before each supervised run."""
    mask = sample.loss_mask
    return [sample.input_ids[:i] for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]


def test_every_answer_with_its_end_of_turn_is_supervised(renderer: ChatRenderer) -> None:
    (sample,) = samples_of(TWO_TURNS, renderer)
    assert supervised(sample, renderer) == ["hello there<|im_end|>", "think about it<|im_end|>"]
    assert renderer.decode(sample.input_ids) == renderer.render(TWO_TURNS, generation_prompt=False)


def test_last_turn_alone(renderer: ChatRenderer) -> None:
    (sample,) = samples_of(TWO_TURNS, renderer, MaskRule(supervise="last_turn"))
    assert supervised(sample, renderer) == ["think about it<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out(renderer: ChatRenderer) -> None:
    assert samples_of([*TWO_TURNS, user("more")], renderer) == samples_of(TWO_TURNS, renderer)


def test_generation_markers_and_prefixes_agree(with_template: MakeRenderer, renderer: ChatRenderer) -> None:
    marked = with_template(MARKED.replace("ROLE", "'assistant'"))
    assert marked.marks_generation
    assert not renderer.marks_generation
    assert samples_of(TWO_TURNS, marked) == samples_of(TWO_TURNS, renderer)


def test_markers_decide_inside_an_answer(with_template: MakeRenderer) -> None:
    template = MARKED.replace("ROLE", "'assistant'").replace(
        "{%- generation -%}{{- m.content -}}", "{{- 'note ' -}}{%- generation -%}{{- m.content -}}"
    )
    renderer = with_template(template)
    (sample,) = samples_of(TWO_TURNS[:2], renderer)
    assert supervised(sample, renderer) == [" hello there<|im_end|>"]
    assert "note hello there" in renderer.decode(sample.input_ids)


def test_markers_of_another_format_supervise_nothing(with_template: MakeRenderer) -> None:
    (sample,) = samples_of(TWO_TURNS, with_template(MARKED.replace("ROLE", "'model'")))
    assert not any(sample.loss_mask)


def test_a_template_without_special_tokens_supervises_the_whole_answer(with_template: MakeRenderer) -> None:
    renderer = with_template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    (sample,) = samples_of(TWO_TURNS, renderer)
    assert supervised(sample, renderer) == [" hello there\n", " think about it\n"]


def test_a_special_token_inside_an_answer_does_not_end_it(with_template: MakeRenderer) -> None:
    renderer = with_template(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (sample,) = samples_of([user("hello"), assistant("one<|endoftext|>two")], renderer)
    assert supervised(sample, renderer) == ["one<|endoftext|>two"]


@pytest.mark.parametrize("settings", [{"enable_thinking": False}, {"enable_thinking": True}, {}])
@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_each_turns_prefix_is_the_servers_prompt(
    template: str, settings: dict[str, Any], with_template: MakeRenderer, renderer: ChatRenderer
) -> None:
    renderer = with_template(THINKING if template == "thinking" else renderer.template, **settings)
    found = samples_of(TWO_TURNS, renderer)
    prefixes = [prefix for sample in found for prefix in prompts_before_answers(sample)]
    served = [
        renderer.tokenizer.apply_chat_template(
            TWO_TURNS[:k],
            chat_template=renderer.template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **settings,
        )
        for k in (1, 3)
    ]
    assert prefixes == served
    # The template leaves the block out of earlier turns, so that one row cannot hold both prompts.
    assert len(found) == (2 if template == "thinking" else 1)


def test_rewritten_history_gives_a_sample_a_turn(with_template: MakeRenderer) -> None:
    chat = [user("a"), assistant("b", reasoning_content="why"), user("c"), assistant("d")]
    renderer = with_template(THINKING)
    first, second = samples_of(chat, renderer)
    assert (first.turn, second.turn) == (1, 3)
    assert supervised(first, renderer) == ["<think>\nwhy\n</think>\n\nb<|im_end|>"]
    assert "why" not in renderer.decode(second.input_ids)
    assert supervised(second, renderer) == ["<think>\n\n</think>\n\nd<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (THINKING, assistant("answer", reasoning_content="because")),
        (THINKING, assistant("<think>\nbecause\n</think>\n\nanswer")),
        ("chatml", assistant("<think>\nbecause\n</think>\n\nanswer")),
        (THINKING, assistant("answer")),
        ("chatml", assistant("answer")),
    ],
    ids=["field", "inline, split by the template", "inline", "empty block", "none"],
)
def test_dropped_thinking_is_unsupervised(
    template: str, message: dict[str, str], with_template: MakeRenderer, renderer: ChatRenderer
) -> None:
    renderer = renderer if template == "chatml" else with_template(template)
    chat = [user("hello"), message]
    (kept,) = samples_of(chat, renderer)
    (dropped,) = samples_of(chat, renderer, MaskRule(thinking="drop"))
    assert dropped.input_ids == kept.input_ids
    assert supervised(dropped, renderer) == ["answer<|im_end|>"]
    assert ("because" in supervised(kept, renderer)[0]) == ("because" in str(message))


def test_a_token_across_prompt_and_answer_is_split(with_template: MakeRenderer) -> None:
    # The prompt ends in a space that the tokenizer would join with the answer's first letters.
    renderer = with_template(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    chat = TWO_TURNS[:2]
    whole = renderer.tokenize([renderer.render(chat, generation_prompt=False)])[0]
    for rule in (MaskRule(), MaskRule(thinking="drop")):
        (sample,) = samples_of(chat, renderer, rule)
        assert sample.input_ids != whole
        assert prompts_before_answers(sample) == renderer.tokenize(
            [renderer.render(chat[:1], generation_prompt=True)]
        )
        assert supervised(sample, renderer) == ["hello there<|im_end|>"]


def test_reasoning_where_the_prompt_closes_it_is_refused(with_template: MakeRenderer) -> None:
    renderer = with_template(THINKING, enable_thinking=False)
    (found,) = MaskRule().apply(
        [Conversation(1, [user("a"), assistant("b", reasoning_content="why")])], renderer
    )
    assert isinstance(found, UnusableConversation)
    assert "enable_thinking" in str(found)
    assert "template.jinja" in str(found)


def test_a_conversation_without_answer_is_unusable(renderer: ChatRenderer) -> None:
    usable, unusable = MaskRule().apply([Conversation(1, TWO_TURNS), Conversation(2, [user("a")])], renderer)
    assert isinstance(usable, list)
    assert isinstance(unusable, UnusableConversation)
    assert str(unusable) == "no assistant turn"
