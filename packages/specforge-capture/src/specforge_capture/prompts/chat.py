"""Chats rendered and tokenised exactly as a server renders them: through the tokenizer's own chat template.

Invariant: nothing here knows any chat format; what a template writes is only compared with what it writes for
    other messages.
"""

import hashlib
import json
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None

_TOKENIZER_FILES = ("*token*", "vocab.*", "*.model", "*.tiktoken", "*.gguf")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusal(ValueError):
    """The chat template does not accept a conversation."""


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer saved in a target's folder.

    Raises:
        ValueError: if the folder is missing or holds no tokenizer.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"target.path: no folder {folder}")
    if not has_tokenizer(folder):  # of the configuration alone transformers would make an empty one
        raise ValueError(
            f"target.path: no tokenizer in {folder}; required: the target's, or pre-tokenised rows in "
            "data.train and no evaluation.prompts"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.path: no readable tokenizer in {folder}: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any(any(Path(folder).glob(name)) for name in _TOKENIZER_FILES)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase, template: str | None) -> str:
    """16 hex digits over the tokenizer's vocabulary, rules and special tokens, and the chat template.

    Padding and truncation are left out: they are a state that each call changes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = {"vocabulary": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
    else:
        rules = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("padding", "truncation")}
    known = [rules, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}, template]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


class Encoded(NamedTuple):
    """A tokenised text."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None
    """Characters [start, stop) of each token, where asked for."""


class ChatRenderer:
    """A tokenizer with one chat template and its settings.

    Args:
        tokenizer: the target's tokenizer.
        template_file: Jinja file that replaces the tokenizer's chat template.
        enable_thinking: passed to the template where not None.

    Raises:
        ValueError: if the template file is missing.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_file: str | Path | None = None,
        enable_thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = _read_template(template_file) if template_file else _own_template(tokenizer)
        """The template's source; None where the tokenizer has none."""
        self.name = f"the chat template {template_file or 'of ' + tokenizer.name_or_path}"
        self.settings: dict[str, Any] = {}
        """What the template is told beside the messages."""
        if enable_thinking is not None:
            self.settings["enable_thinking"] = enable_thinking
        self.marks_generation = bool(self.template and _GENERATION.search(self.template))
        """Whether the template marks what the model writes by `{% generation %}`."""

    @cached_property
    def hash(self) -> str:
        """Hash of the tokenizer and the effective template."""
        return tokenizer_hash(self.tokenizer, self.template)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokenizer's special tokens."""
        added = (i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        return frozenset({*added, *self.tokenizer.all_special_ids})

    def render(self, messages: Messages, tools: Tools = None, *, generation_prompt: bool) -> str:
        """The text of a conversation, up to the point where the assistant writes if `generation_prompt`.

        Raises:
            TemplateRefusal: if the template refuses the conversation, for example for the order of its roles.
        """
        with self._refusals():
            # As a batch of one: a conversation without messages is legal there.
            rendered: Any = self.tokenizer.apply_chat_template(
                [messages],
                tools=cast(Any, tools),
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.settings,
            )
            return rendered[0]

    def marked(self, messages: Messages, tools: Tools = None) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the character ranges inside the template's generation markers.

        Raises:
            TemplateRefusal: if the template refuses the conversation.
        """
        with self._refusals():
            # What apply_chat_template renders itself; it hands out the ranges only as tokens, row by row.
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=cast(Any, tools),
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **cast(dict[str, Any], self.tokenizer.special_tokens_map),
                **self.settings,
            )
            (text,), (ranges,) = rendered
            return text, ranges

    def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of each text; a rendered chat already holds its special tokens."""
        if not texts:
            return []
        return self.tokenizer(list(texts), add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids)))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of rendered chats, with their characters where the template has generation markers."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_offsets_mapping=self.marks_generation,
            verbose=False,
        )
        ids, offsets = encoded["input_ids"], encoded.get("offset_mapping", [None] * len(texts))
        return [Encoded(*pair) for pair in zip(ids, offsets, strict=True)]

    @contextmanager
    def _refusals(self) -> Generator[None]:
        """Errors of the template become refusals; having none is the user's error."""
        if self.template is None:
            raise ValueError(f"{self.name}: there is none; set data.chat_template to a Jinja file")
        try:
            yield
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            raise TemplateRefusal(f"{self.name} refuses it: {error}") from error


class NoTokenizer(ChatRenderer):
    """Stands in for the tokenizer that a target's folder lacks, where all rows are tokenised already."""

    hash = "none"

    def __init__(self) -> None:
        self.template, self.settings, self.marks_generation = None, {}, False
        self.name = "pre-tokenised rows"

    def decode(self, ids: Sequence[int]) -> str:
        """The ids themselves."""
        return "".join(f"{token} " for token in ids)


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    return tokenizer.get_chat_template() if tokenizer.chat_template else None


def _read_template(path: str | Path) -> str:
    if not Path(path).is_file():
        raise ValueError(f"data.chat_template: no file {path}")
    return Path(path).read_text(encoding="utf-8")
