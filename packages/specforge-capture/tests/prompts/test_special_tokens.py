import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.masks import MaskRule
from specforge_capture.prompts.sources import Conversation
from specforge_capture.prompts.special_tokens import (
    SpecialTokens,
    end_of_turn,
    resolve_mask_token,
    resolve_special_tokens,
)

SPECIAL = SpecialTokens(stop=(2,), pad=0)


@pytest.fixture
def bare(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Without any named special token."""
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = bare.eos_token = bare.mask_token = None
    return bare


def generation_config(folder: Path, **fields: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_tokenizer_and_generation_config_are_joined(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = generation_config(tmp_path, eos_token_id=[2, 0])
    assert resolve_special_tokens(tokenizer, folder) == SpecialTokens(stop=(2, 0), pad=0)


def test_without_pad_the_first_end_of_sequence_token_pads(
    bare: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder = generation_config(tmp_path, eos_token_id=[2, 3])
    assert resolve_special_tokens(bare, folder) == SpecialTokens(stop=(2, 3), pad=2)


def test_without_tokenizer_the_configuration_names_them(tmp_path: Path) -> None:
    assert resolve_special_tokens(None, tmp_path) == SpecialTokens(stop=(), pad=None)
    text = {"eos_token_id": 5, "pad_token_id": 6}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [4], "text_config": text}))
    assert resolve_special_tokens(None, tmp_path) == SpecialTokens(stop=(4, 5), pad=6)
    special = resolve_special_tokens(None, generation_config(tmp_path, eos_token_id=[7, 4]))
    assert special == SpecialTokens(stop=(7, 4, 5), pad=6)
    assert resolve_mask_token(None, 10, 9, special) == 9
    with pytest.raises(ValueError, match=r"draft\.mask_token_id is unset"):
        resolve_mask_token(None, 10, None, special)


def test_an_end_of_sequence_token_inside_an_answer_stays_supervised(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = None
    renderer = ChatRenderer(tokenizer)
    assert resolve_special_tokens(tokenizer, None, renderer).pad == 2
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]
    (found,) = MaskRule().apply([Conversation(1, chat)], renderer)
    assert isinstance(found, list)
    ends = [i for i, token in enumerate(found[0].input_ids) if token == 2]
    assert [found[0].loss_mask[i] for i in ends] == [False, True, True]


def test_nothing_that_ends_an_answer_is_an_error(bare: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither an end-of-sequence token"):
        resolve_special_tokens(bare, tmp_path)


def test_the_templates_end_of_turn_stops_where_the_tokenizers_does_not(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.eos_token = "<|im_start|>"
    renderer = ChatRenderer(tokenizer)
    assert end_of_turn(renderer) == 2
    assert resolve_special_tokens(tokenizer, None, renderer).stop == (1, 2)


def test_a_template_without_end_of_turn_ends_nothing(with_template: Callable[..., ChatRenderer]) -> None:
    assert end_of_turn(with_template("{% for m in messages %}{{ m.content }}{% endfor %}")) is None


def test_the_tokenizers_mask_token_is_the_default(tokenizer: PreTrainedTokenizerFast) -> None:
    assert resolve_mask_token(tokenizer, 320, None, SPECIAL) == 3
    assert resolve_mask_token(tokenizer, 320, 300, SPECIAL) == 300


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (320, "required: below 320, the rows of the target's embedding"),
        (2, "an end-of-sequence token"),
        (0, "the padding token"),
    ],
)
def test_unusable_mask_tokens(tokenizer: PreTrainedTokenizerFast, configured: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_mask_token(tokenizer, 320, configured, SPECIAL)


def test_no_mask_token_at_all(bare: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"draft\.mask_token_id is unset"):
        resolve_mask_token(bare, 320, None, SPECIAL)
