"""The special tokens of a target: where answers end, what pads, what masks.

Invariant: no token is supervised or ignored because of its id. An end-of-sequence token inside an answer
    stays a label even where it also pads.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from specforge_capture.prompts.chat import ChatRenderer, TemplateRefusal
from specforge_config.draft import check_mask_token


@dataclass(frozen=True)
class SpecialTokens:
    """Ids that end an answer, and the id that pads."""

    stop: tuple[int, ...]
    pad: int | None


def resolve_special_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path | None = None,
    renderer: ChatRenderer | None = None,
) -> SpecialTokens:
    """Collect what ends an answer from the tokenizer, `generation_config.json` and the chat template.

    Tokenizers exist whose end-of-sequence token never ends an answer (SmolLM2's is `<|im_start|>`), so the
    token that the template itself writes behind an answer counts too.

    Args:
        tokenizer: the target's tokenizer; without one `generation_config.json` and `config.json` speak alone.
        folder: the target's folder, for its `generation_config.json`.
        renderer: the chat template.

    Raises:
        ValueError: if there is a tokenizer and nothing ends an answer.
    """
    if tokenizer is None:
        assert folder is not None
        return _configured_tokens(Path(folder))
    generation = None
    if folder is not None and (Path(folder) / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    found = [
        *_ids(tokenizer.eos_token_id),
        *_ids(generation.eos_token_id if generation else None),
        *_ids(end_of_turn(renderer) if renderer and renderer.template else None),
    ]
    stop = tuple(dict.fromkeys(found))
    if not stop:
        raise ValueError(
            "the target has neither an end-of-sequence token (tokenizer_config.json, generation_config.json) "
            "nor a chat template that ends answers with a special token: set eos_token in the former"
        )
    pads = [*_ids(tokenizer.pad_token_id), *_ids(generation.pad_token_id if generation else None), *stop]
    return SpecialTokens(stop, pads[0])


def _configured_tokens(folder: Path) -> SpecialTokens:
    files = [folder / name for name in ("generation_config.json", "config.json")]
    known = [json.loads(path.read_text()) for path in files if path.is_file()]
    known += [config["text_config"] for config in known if isinstance(config.get("text_config"), dict)]
    stop = tuple(dict.fromkeys(token for config in known for token in _ids(config.get("eos_token_id"))))
    pads = [token for config in known for token in _ids(config.get("pad_token_id"))]
    return SpecialTokens(stop, next(iter([*pads, *stop]), None))


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def end_of_turn(renderer: ChatRenderer) -> int | None:
    """The special token that the chat template writes behind an answer; None if it writes none."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        prompt = renderer.render(chat[:1], generation_prompt=True)
        full = renderer.render(chat, generation_prompt=False)
    except TemplateRefusal:
        return None
    if not full.startswith(prompt):
        return None
    (answer,) = renderer.tokenize([full[len(prompt) :]])
    special = [token for token in answer if token in renderer.special_ids]
    return special[-1] if special else None


def resolve_mask_token(
    tokenizer: PreTrainedTokenizerBase | None,
    embedding_rows: int,
    configured: int | None,
    special: SpecialTokens,
) -> int:
    """The token that fills a draft's slots.

    Args:
        tokenizer: the target's tokenizer, whose mask token is the default; None where there is none.
        embedding_rows: rows of the target's embedding.
        configured: `draft.mask_token_id`.
        special: the target's stop and pad tokens, which data holds.

    Raises:
        ValueError: if there is none, or it has no embedding row, or it ends or pads text.
    """
    token = tokenizer.mask_token_id if configured is None and tokenizer is not None else configured
    check_mask_token(token, embedding_rows, special.stop, special.pad)
    assert token is not None
    return token
