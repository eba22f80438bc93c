"""What a target backend offers: packed capture of hidden states for the trainer, and decoding for evaluation.

Notation: T packed tokens, K captured layers, H hidden size, V vocabulary, n new tokens of one sequence.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from specforge_config.features import CaptureSpec, FeatureBatch


@dataclass(frozen=True)
class PromptRow:
    """One tokenised training sample and its place in the prompt plan."""

    sample_id: str
    """Where the row comes from: `file:line`, with `#turn` where a conversation gave several rows."""
    input_ids: np.ndarray
    """[S] int32."""
    loss_mask: np.ndarray
    """[S] bool: the token is supervised as a label."""
    position: tuple[int, int] = (0, 0)
    """(epoch, position in the epoch's permutation): the task id."""


ALL = slice(None)
"""Every row."""


class Target(Protocol):
    """A frozen target that captures the states of `spec`."""

    spec: CaptureSpec

    def capture(self, rows: Sequence[PromptRow], own: slice = ALL) -> FeatureBatch:
        """Run the target over `rows`, packed without padding, and keep what belongs to `rows[own]`, in their
        order. The rest is not copied, and nothing of it is kept alive."""
        ...

    def close(self) -> None:
        """Free the target's memory."""
        ...


@dataclass(frozen=True)
class Extension:
    """What the target says about the n tokens that a decoding step appended."""

    logits: Tensor
    """[n, V]: row i predicts the token after new token i."""
    hidden: Tensor
    """[n, K * H]: captured states of the new tokens."""


class DecodingTarget(Protocol):
    """A target that also decodes one sequence, for evaluation."""

    stop_ids: tuple[int, ...]

    def decoding(self) -> AbstractContextManager[bool]:
        """Where the target decodes: True on the rank of its island that does, False on the others once it is
        done."""
        ...

    def start(self) -> Any:
        """An empty key-value cache."""
        ...

    def extend(self, ids: Tensor, cache: Any) -> Extension:
        """Append `ids` [n] int64 to the sequence in `cache`."""
        ...

    def crop(self, cache: Any, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence in `cache`."""
        ...


def token_range(rows: Sequence[PromptRow], own: slice) -> slice:
    """Where the tokens of `rows[own]`, neighbours in `rows`, lie among the packed tokens of `rows`."""
    start, stop, _ = own.indices(len(rows))
    before, within = (sum(len(row.input_ids) for row in part) for part in (rows[:start], rows[start:stop]))
    return slice(before, before + within)


def feature_batch(
    rows: Sequence[PromptRow], hidden: Tensor, last_hidden: Tensor | None, spec: CaptureSpec
) -> FeatureBatch:
    """Captured rows, packed in their order, as the batch that a trainer takes.

    Args:
        rows: what was captured.
        hidden: [T, K·H] states of the wanted layers.
        last_hidden: [T, H] final post-norm states, kept if the contract asks for them.
        spec: the capture contract.

    Raises:
        ValueError: for states that do not fit the rows or the contract.
    """
    return FeatureBatch(
        tokens=torch.from_numpy(np.concatenate([row.input_ids for row in rows]).astype(np.int64)),
        loss_mask=torch.from_numpy(np.concatenate([row.loss_mask for row in rows]).astype(bool)),
        cu_seqlens=torch.from_numpy(np.cumsum([0, *(len(row.input_ids) for row in rows)], dtype=np.int64)),
        hidden=hidden,
        last_hidden=last_hidden if spec.final_state else None,
        sample_ids=tuple(row.sample_id for row in rows),
        positions=tuple(row.position for row in rows),
        spec=spec,
    )
