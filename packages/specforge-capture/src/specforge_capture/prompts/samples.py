"""From prompt files to training samples: rendering, masks, length limits, and a report of what is left."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.masks import MaskRule, UnusableConversation
from specforge_capture.prompts.sources import (
    Conversation,
    Rejected,
    SourceRow,
    Text,
    Tokens,
    detect_format,
    read_rows,
)
from specforge_config.data import DataConfig

Progress = Callable[[int, float], None]
"""Called with the rows read so far and their share of the input in [0, 1]."""


@dataclass(frozen=True)
class Dropped:
    """A row that gave no sample."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass
class PromptReport:
    """What became of the rows of the prompt files."""

    rows: int = 0
    """Rows read."""
    kept: int = 0
    """Rows that gave a sample."""
    samples: int = 0
    """Samples; more than `kept` where the template rewrites history."""
    truncated: int = 0
    """Samples cut at `data.max_length`."""
    tokens: int = 0
    """Tokens of all samples."""
    supervised: int = 0
    """Supervised tokens of all samples."""
    dropped: list[Dropped] = field(default_factory=list)
    """Rows left out, in order."""

    def __str__(self) -> str:
        text = f"{self.kept} of {self.rows} rows kept: {self.samples} samples, {self.tokens} tokens"
        text += f", {self.supervised} supervised"
        if self.truncated:
            text += f"; {self.truncated} cut at data.max_length"
        if self.dropped:
            shown = "; ".join(f"row {row.line}, {row.reason}" for row in self.dropped[:5])
            more = len(self.dropped) - 5
            text += f"; {len(self.dropped)} dropped: {shown}" + (f"; and {more} more" if more > 0 else "")
        return text

    def reasons(self) -> Counter[str]:
        """How often each reason occurs."""
        return Counter(row.reason for row in self.dropped)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "PromptReport":
        """The inverse of `to_json`."""
        counts = {name: count for name, count in value.items() if name != "dropped"}
        return cls(**counts, dropped=[Dropped(**row) for row in value["dropped"]])


@dataclass(frozen=True)
class Sample:
    """One tokenised training sample."""

    sample_id: str
    input_ids: np.ndarray
    """[S] int32."""
    loss_mask: np.ndarray
    """[S] bool."""


class _Piece(NamedTuple):
    """Tokens and mask of a sample before its checks; `suffix` tells the samples of one row apart."""

    suffix: str
    ids: np.ndarray
    mask: np.ndarray


def _piece(suffix: str, ids: list[int], mask: list[bool]) -> _Piece:
    return _Piece(suffix, np.array(ids, dtype=np.int64), np.array(mask, dtype=bool))


class SampleReader:
    """Streams the samples of a configuration's prompt files.

    Args:
        data: the configuration.
        renderer: tokenizer and chat template.
        vocab_size: rows of the target's embedding; larger ids are refused.
        mask_token_id: the draft's mask token, which must not occur in data.
    """

    def __init__(
        self, data: DataConfig, renderer: ChatRenderer, vocab_size: int, mask_token_id: int | None
    ) -> None:
        self.data = data
        self.renderer = renderer
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.rule = MaskRule(data.supervise, data.thinking)
        self.report = PromptReport()

    def samples(self, progress: Progress | None = None) -> Iterator[Sample]:
        """Yield samples in file order and fill `report`.

        Raises:
            ValueError: for an unreadable file; under `data.strict`, for the first row that cannot be used.
        """
        sizes = [Path(path).stat().st_size if Path(path).is_file() else 0 for path in self.data.train]
        done, total = 0, max(sum(sizes), 1)
        for path, size in zip(map(Path, self.data.train), sizes, strict=True):
            form = detect_format(path) if self.data.format == "auto" else self.data.format
            for rows, share in read_rows(path, form):
                self.report.rows += len(rows)
                for row, found in zip(rows, self._expand(rows), strict=True):
                    yield from self._admit(path, row.line, found)
                if progress:
                    progress(self.report.rows, (done + share * size) / total)
            done += size

    def _expand(self, rows: Sequence[SourceRow]) -> list[str | list[_Piece]]:
        """For each row its samples, or why it has none."""
        chats = [row for row in rows if isinstance(row, Conversation)]
        masked = dict(zip((c.line for c in chats), self.rule.apply(chats, self.renderer), strict=True))
        texts = [row for row in rows if isinstance(row, Text)]
        plain = self.renderer.tokenize([row.text for row in texts], add_special_tokens=True)
        tokens = dict(zip((t.line for t in texts), plain, strict=True))
        found: list[str | list[_Piece]] = []
        for row in rows:
            if isinstance(row, Rejected):
                found.append(row.reason)
            elif isinstance(row, Tokens):
                found.append([_Piece("", row.input_ids, row.loss_mask)])
            elif isinstance(row, Text):
                found.append([_piece("", tokens[row.line], [True] * len(tokens[row.line]))])
            elif isinstance(samples := masked[row.line], UnusableConversation):
                found.append(str(samples))
            else:
                several = len(samples) > 1
                found.append(
                    [_piece(f"#{s.turn}" if several else "", s.input_ids, s.loss_mask) for s in samples]
                )
        return found

    def _admit(self, path: Path, line: int, found: str | list[_Piece]) -> Iterator[Sample]:
        """The trainable samples of one row; a row without any is recorded, or an error under `strict`."""
        reasons = [found] if isinstance(found, str) else []
        admitted = 0
        for suffix, ids, mask in () if isinstance(found, str) else found:
            if reason := self._unusable(ids, mask):
                reasons.append(reason)
                continue
            self.report.truncated += len(ids) > self.data.max_length
            ids, mask = ids[: self.data.max_length], mask[: self.data.max_length]
            admitted += 1
            self.report.samples += 1
            self.report.tokens += len(ids)
            self.report.supervised += int(mask.sum())
            yield Sample(f"{path.name}:{line}{suffix}", ids.astype(np.int32), mask)
        if admitted:
            self.report.kept += 1
            return
        dropped = Dropped(path.name, line, reasons[0])
        if self.data.strict:
            raise ValueError(f"data.strict: {path}:{line}: {dropped.reason}")
        self.report.dropped.append(dropped)

    def _unusable(self, ids: np.ndarray, mask: np.ndarray) -> str | None:
        """Why a sample cannot be trained on."""
        limit = self.data.max_length
        if len(ids) < 2:
            return f"{len(ids)} tokens, required at least two"
        if len(ids) > limit and self.data.overlong == "drop":
            return f"{len(ids)} tokens, above data.max_length={limit}"
        if (low := ids.min()) < 0 or (high := ids.max()) >= self.vocab_size:
            return f"token {low if low < 0 else high} outside the target's vocabulary of {self.vocab_size}"
        if self.mask_token_id is not None and (ids == self.mask_token_id).any():
            return f"holds the draft's mask token {self.mask_token_id}"
        if not mask.any():
            return f"no supervised token ({self.renderer.name})"
        if not mask[:limit].any():
            return f"no supervised token in the first data.max_length={limit} tokens"
        return None
