import copy
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specforge_capture.prompts.chat import ChatRenderer, TemplateRefusal, load_tokenizer

CHAT = [{"role": "user", "content": "hello"}]
ALTERNATING = """\
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant') -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endfor -%}
"""


def test_a_template_file_replaces_the_tokenizers_own(with_template: Callable[..., ChatRenderer]) -> None:
    renderer = with_template("{{ messages[0].content }}!")
    assert renderer.render(CHAT, generation_prompt=False) == "hello!"


def test_enable_thinking_reaches_the_template_only_where_set(
    with_template: Callable[..., ChatRenderer],
) -> None:
    template = "{{ 'unset' if enable_thinking is not defined else enable_thinking }}"
    assert with_template(template).render(CHAT, generation_prompt=True) == "unset"
    assert with_template(template, enable_thinking=False).render(CHAT, generation_prompt=True) == "False"


def test_a_refused_conversation_names_the_template(with_template: Callable[..., ChatRenderer]) -> None:
    renderer = with_template(ALTERNATING)
    with pytest.raises(TemplateRefusal, match=r"template\.jinja refuses it: roles must alternate"):
        renderer.render([{"role": "assistant", "content": "a"}], generation_prompt=False)


def test_a_missing_template_is_an_error_and_no_refusal(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"set data\.chat_template") as error:
        ChatRenderer(bare).render(CHAT, generation_prompt=True)
    assert not isinstance(error.value, TemplateRefusal)


def test_a_missing_template_file_is_an_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.chat_template: no file"):
        ChatRenderer(tokenizer, tmp_path / "absent.jinja")


def test_one_character_of_the_template_changes_the_hash(
    renderer: ChatRenderer, with_template: Callable[..., ChatRenderer]
) -> None:
    assert renderer.template
    assert with_template(renderer.template).hash == renderer.hash
    assert with_template(renderer.template + " ").hash != renderer.hash


def test_padding_and_truncation_do_not_change_the_hash(tokenizer: PreTrainedTokenizerFast) -> None:
    used = copy.deepcopy(tokenizer)
    before = ChatRenderer(used).hash
    used(["hello", "hello there"], padding=True, truncation=True, max_length=2)
    assert ChatRenderer(used).hash == before


def test_an_added_token_changes_the_hash(tokenizer: PreTrainedTokenizerFast) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<tool>"])
    assert ChatRenderer(larger).hash != ChatRenderer(tokenizer).hash


def test_tokenizers_load_from_a_folder(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = ChatRenderer(load_tokenizer(tmp_path / "saved"))
    assert loaded.hash == ChatRenderer(tokenizer).hash


def test_a_folder_without_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target\.path: no folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"target\.path: no tokenizer in .*pre-tokenised rows"):
        load_tokenizer(tmp_path)
