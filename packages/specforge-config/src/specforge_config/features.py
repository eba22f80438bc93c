"""What passes between capture and training: the capture contract and a packed batch of features.

Invariant: tokens, masks and offsets live on the host, hidden states on the device that captured them. So
everything that is derived from tokens alone (anchors, labels, loss denominators) is known without a device
synchronisation.

Notation: T packed tokens, B documents, K captured layers, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from specforge_config.base import Config
from specforge_config.target import ElementType

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA_VERSION = 1


class CaptureSpec(Config):
    """The contract that fixes what a captured feature means; resolved once for a run.

    Engines are started from it, the trainer validates against it, every stored sample and every checkpoint
    carries it.
    """

    method: Literal["dspark", "dflash", "eagle3"]
    """Draft method the features are for."""
    layer_ids: tuple[int, ...]
    """Captured target layers, post-layer and 0-based: id k is the output of decoder layer k. Their order is
    the columns' order."""
    final_state: bool
    """Whether the target's final post-norm hidden state is captured too."""
    dtype: ElementType
    """Element type of the captured states."""
    hidden_size: int
    """H of the target."""
    vocab_size: int
    """Rows of the target's vocabulary head."""
    target_revision: str
    """Hash of the target's configuration and weight index, or the revision that its user names."""
    tokenizer_hash: str
    """Hash of the tokenizer and its chat template."""
    schema_version: int = SCHEMA_VERSION
    """Version of this contract."""

    def differences(self, other: CaptureSpec) -> dict[str, tuple[object, object]]:
        """Field -> (own value, other's value) for each field that differs."""
        mine, theirs = self.model_dump(), other.model_dump()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def require_equal(self, other: CaptureSpec, *, here: str, there: str) -> None:
        """Check that two contracts agree.

        Args:
            other: the contract to compare with.
            here: what this contract describes, for the message ("this run").
            there: what `other` describes ("the checkpoint outputs/x/step-10").

        Raises:
            ValueError: naming each field that differs, with both values.
        """
        if found := self.differences(other):
            rows = "\n".join(f"  {name}: {a!r} ({here}) != {b!r} ({there})" for name, (a, b) in found.items())
            raise ValueError(f"the capture contracts of {here} and {there} differ:\n{rows}")


def spec_hash(spec: CaptureSpec) -> str:
    """64 hex digits that name a contract: sha256 of its JSON with sorted keys and no spaces."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class StreamStopped(Exception):
    """There are no more features though the plan has not ended, as their source was stopped. All ranks see it
    before the same optimizer step."""


@dataclass(frozen=True)
class FeatureBatch:
    """Packed rows of one capture, without padding.

    Rows of document i are `cu_seqlens[i]:cu_seqlens[i + 1]`.
    """

    tokens: Tensor
    """[T] int64, host."""
    loss_mask: Tensor
    """[T] bool, host: the token is supervised as a label."""
    cu_seqlens: Tensor
    """[B + 1] int64, host: document offsets, from 0 to T."""
    hidden: Tensor
    """[T, K * H], capture device: the states of `spec.layer_ids`, concatenated in that order."""
    last_hidden: Tensor | None
    """[T, H], capture device: the final post-norm state; None unless `spec.final_state`."""
    sample_ids: tuple[str, ...]
    """[B] identities of the rows."""
    positions: tuple[tuple[int, int], ...]
    """[B] (epoch, position in the epoch's permutation) of each row: its task id in the prompt plan."""
    spec: CaptureSpec
    """The contract under which the states were captured."""

    def __post_init__(self) -> None:
        """Check the shapes against the contract.

        Raises:
            ValueError: for a capture that is short, too wide or without the final state.
        """
        rows, documents = self.tokens.shape[0], len(self.sample_ids)
        width = len(self.spec.layer_ids) * self.spec.hidden_size
        found = {
            "loss_mask": (tuple(self.loss_mask.shape), (rows,)),
            "cu_seqlens": (tuple(self.cu_seqlens.shape), (documents + 1,)),
            "positions": ((len(self.positions),), (documents,)),
            "hidden": (tuple(self.hidden.shape), (rows, width)),
        }
        if self.spec.final_state:
            last = None if self.last_hidden is None else tuple(self.last_hidden.shape)
            found["last_hidden"] = (last, (rows, self.spec.hidden_size))
        elif self.last_hidden is not None:
            found["last_hidden"] = (tuple(self.last_hidden.shape), None)
        wrong = [f"{name} is {a}, required {b}" for name, (a, b) in found.items() if a != b]
        offsets = self.cu_seqlens.tolist()
        if not wrong and (
            offsets[0] != 0 or offsets[-1] != rows or any(a >= b for a, b in pairwise(offsets))
        ):
            wrong = [f"cu_seqlens is {offsets}, required ascending offsets from 0 to {rows}"]
        if wrong:
            raise ValueError(f"partial or misshapen capture of {list(self.sample_ids)}: " + "; ".join(wrong))

    @property
    def state_bytes(self) -> int:
        """Bytes of the captured states."""
        return sum(t.numel() * t.element_size() for t in (self.hidden, self.last_hidden) if t is not None)
