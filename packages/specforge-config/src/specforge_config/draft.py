"""The draft to train: a union over methods. A method's own fields are here, its code in
`specforge_train.methods`."""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, Tag

from specforge_config.base import Config, InputPath, tagged


class Backbone(Config):
    """Fields of every draft. Sizes left out are the target's."""

    num_layers: PositiveInt = 5
    """Decoder layers of the draft."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers whose states the draft reads, post-layer and 0-based; default: five, evenly spaced over
    the depth."""
    intermediate_size: PositiveInt | None = None
    """Width of the draft's feed-forward layers."""
    num_heads: PositiveInt | None = None
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads; must divide `num_heads`."""
    head_dim: PositiveInt | None = None
    """Width of one head."""
    rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary position embedding."""
    rope_scaling: dict[str, float | str] | None = None
    """Rotary scaling as transformers writes it, for example `{rope_type: yarn, factor: 16,
    original_max_position_embeddings: 4096}`."""
    max_positions: PositiveInt | None = None
    """Longest position written into the exported configuration."""
    rms_norm_eps: float | None = Field(None, gt=0)
    """Epsilon of the RMS norms."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of newly initialised matrices."""
    init_from: InputPath | None = None
    """Checkpoint or exported draft whose weights (not optimizer or step) a run starts from."""

    def _faults(self) -> Iterator[str]:
        if self.target_layer_ids is not None:
            yield from _layer_id_faults(self.target_layer_ids)
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            yield (
                f"num_kv_heads is {self.num_kv_heads}, num_heads is {self.num_heads}; "
                "required: num_kv_heads that divides num_heads"
            )
        if self.head_dim and self.head_dim % 2:
            yield f"head_dim is {self.head_dim}; required: an even number, as rotary embeddings turn pairs"
        if self.rope_scaling is not None and not self.rope_scaling.keys() & {"rope_type", "type"}:
            yield f"rope_scaling has {sorted(self.rope_scaling)}; required: rope_type among them"


class MarkovConfig(Config):
    """The Markov head: a low-rank logit bias from the previous token."""

    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """`vanilla`: W2 W1[prev]; `gated`: a sigmoid gate of the state and the embedding; `rnn`: a gated state
    over the block."""
    rank: PositiveInt = 256
    """Rank R of the bias."""


class ConfidenceConfig(Config):
    """The confidence head, which predicts the acceptance probability of each slot."""

    enabled: bool = True
    """Whether the head exists."""
    with_markov: bool = True
    """Whether it reads the previous token's Markov embedding beside the hidden state."""


class DSparkLossConfig(Config):
    """Weights of the terms of DSpark's objective."""

    ce: float = Field(0.1, ge=0)
    """Weight of the cross-entropy to the data token."""
    l1: float = Field(0.9, ge=0)
    """Weight of the L1 distance to the target's distribution."""
    confidence: float = Field(1.0, ge=0)
    """Weight of the confidence head's binary cross-entropy."""
    decay: float = Field(4.0, gt=0)
    """Slot k weighs exp(-k / decay)."""


class BlockDraft(Backbone):
    """Fields of the methods that draft a block in one pass (DSpark, DFlash)."""

    block_size: int = Field(7, ge=2)
    """Tokens drafted in one pass (γ)."""
    num_anchors: PositiveInt = 512
    """Anchors drawn for each sample."""
    mask_token_id: int | None = Field(None, ge=0)
    """Token that fills the slots behind the anchor; default: the tokenizer's mask token. Must not occur in
    data."""
    sliding_window: PositiveInt | None = None
    """Context tokens that a slot sees, itself included; None sees all."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.sliding_window is not None and self.sliding_window <= self.block_size:
            yield (
                f"sliding_window is {self.sliding_window}; required: more than block_size {self.block_size}, "
                "or the last slots see no context"
            )


class DSparkConfig(BlockDraft):
    """DSpark (arXiv 2607.05147)."""

    method: Literal["dspark"] = "dspark"
    """Discriminator."""
    markov: MarkovConfig = MarkovConfig()
    """Markov head."""
    confidence: ConfidenceConfig = ConfidenceConfig()
    """Confidence head."""
    loss: DSparkLossConfig = DSparkLossConfig()
    """Weights of the objective."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if not self.confidence.enabled:
            if self.loss.confidence not in (0, DSparkLossConfig().confidence):
                yield "loss.confidence is set, but confidence.enabled is false; required: drop one"
            if not self.confidence.with_markov:
                yield "confidence.with_markov is set, but confidence.enabled is false; required: drop one"
        if not (self.loss.ce or self.loss.l1):
            yield "loss.ce and loss.l1 are both 0, which trains no token; required: one above 0"


class DFlashConfig(BlockDraft):
    """DFlash (arXiv 2602.06036)."""

    method: Literal["dflash"]
    """Discriminator."""
    decay: float = Field(7.0, gt=0)
    """Slot k weighs exp(-(k - 1) / decay)."""


class Eagle3Config(Backbone):
    """EAGLE3 (arXiv 2503.01840)."""

    method: Literal["eagle3"]
    """Discriminator."""
    draft_vocab_size: PositiveInt | None = None
    """Size of the pruned draft vocabulary; None keeps the target's."""
    ttt_steps: PositiveInt = 7
    """Unrolled steps of the training-time test."""


DraftConfig = Annotated[
    Annotated[DSparkConfig, Tag("dspark")]
    | Annotated[DFlashConfig, Tag("dflash")]
    | Annotated[Eagle3Config, Tag("eagle3")],
    tagged("method", "dspark"),
]
"""The draft's method and its settings."""


def default_layer_ids(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` post-layer ids, evenly from layer 1 to the third from last, as in the DFlash and DSpark papers.

    36 layers give (1, 9, 17, 25, 33). A target too shallow for that gives up to `count` of its layers before
    the last.
    """
    first, last = 1, num_target_layers - 3
    if last < count:
        first, last = 0, max(num_target_layers - 2, 0)
    count = min(count, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def _layer_id_faults(ids: Sequence[int]) -> Iterator[str]:
    if not ids:
        yield "target_layer_ids is empty; required: at least one layer"
    if len(set(ids)) < len(ids):
        yield f"target_layer_ids is {list(ids)}; required: each layer once"
    if any(layer < 0 for layer in ids):
        yield f"target_layer_ids is {list(ids)}; required: 0 or more, counted from the first layer's output"


def check_layer_ids(ids: Sequence[int], num_target_layers: int) -> None:
    """Check the captured layers against the target's depth. Any order is allowed: it is that of the columns.

    Args:
        ids: post-layer, 0-based ids.
        num_target_layers: decoder layers of the target.

    Raises:
        ValueError: for no ids, repeated ids, and ids that the target does not have.
    """
    faults = list(_layer_id_faults(ids))
    if any(layer >= num_target_layers for layer in ids):
        faults.append(
            f"target_layer_ids is {list(ids)}; required: at most {num_target_layers - 1}, "
            f"as the target has {num_target_layers} layers"
        )
    if faults:
        raise ValueError("\n".join(f"draft.{fault}" for fault in faults))


def check_mask_token(
    mask_token_id: int | None, vocab_rows: int, eos_ids: Collection[int], pad_id: int | None
) -> None:
    """Check the token that fills a block's unknown slots.

    Args:
        mask_token_id: `draft.mask_token_id`, or the tokenizer's mask token.
        vocab_rows: rows of the target's embedding, which may exceed the tokenizer's length.
        eos_ids: tokens that end an answer.
        pad_id: the padding token, if there is one.

    Raises:
        ValueError: if the token is unset, has no embedding row or has another meaning already.
    """
    if mask_token_id is None:
        raise ValueError(
            "draft.mask_token_id is unset and the tokenizer has no mask token; "
            "required: draft.mask_token_id, a token that does not occur in data"
        )
    if not 0 <= mask_token_id < vocab_rows:
        raise ValueError(
            f"draft.mask_token_id is {mask_token_id}; "
            f"required: below {vocab_rows}, the rows of the target's embedding"
        )
    roles = {
        "an end-of-sequence token": mask_token_id in eos_ids,
        "the padding token": mask_token_id == pad_id,
    }
    for role in (name for name, taken in roles.items() if taken):
        raise ValueError(
            f"draft.mask_token_id is {mask_token_id}, {role}; required: a token that does not occur in data"
        )
