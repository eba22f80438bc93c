"""The special tokens of a target: where answers end, what pads, what masks.

Invariant: no token is supervised or ignored because of its id. An end-of-sequence token inside an answer
    stays a label even where it also pads.
"""

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
    pad: int


def resolve_special_tokens(
    tokenizer: PreTrainedTokenizerBase, folder: str | Path | None = None, renderer: ChatRenderer | None = None
) -> SpecialTokens:
    """Collect what ends an answer from the tokenizer, `generation_config.json` and the chat template.

    Tokenizers exist whose end-of-sequence token never ends an answer (SmolLM2's is `<|im_start|>`), so the
    token that the template itself writes behind an answer counts too.

    Args:
        tokenizer: the target's tokenizer.
        folder: the target's folder, for its `generation_config.json`.
        renderer: the chat template.

    Raises:
        ValueError: if nothing ends an answer.
    """
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
    tokenizer: PreTrainedTokenizerBase, embedding_rows: int, configured: int | None, special: SpecialTokens
) -> int:
    """The token that fills a draft's slots.

    Args:
        tokenizer: the target's tokenizer, whose mask token is the default.
        embedding_rows: rows of the target's embedding.
        configured: `draft.mask_token_id`.
        special: the target's stop and pad tokens, which data holds.

    Raises:
        ValueError: if there is none, or it has no embedding row, or it ends or pads text.
    """
    token = tokenizer.mask_token_id if configured is None else configured
    check_mask_token(token, embedding_rows, special.stop, special.pad)
    assert token is not None
    return token
