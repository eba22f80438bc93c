"""The draft to train: a union over methods. A method's own fields are here, its code in `specforge_train.methods`."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from specforge_config.base import Config, InputPath


class Backbone(Config):
    """Fields of every draft. Sizes left out are the target's."""

    num_layers: PositiveInt = 5
    """Decoder layers of the draft."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers whose states the draft reads, post-layer and 0-based; default: five, evenly spaced over the depth."""
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
    """Rotary scaling as transformers writes it, for example `{rope_type: yarn, factor: 16, original_max_position_embeddings: 4096}`."""
    max_positions: PositiveInt | None = None
    """Longest position written into the exported configuration."""
    rms_norm_eps: float | None = Field(None, gt=0)
    """Epsilon of the RMS norms."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of newly initialised matrices."""
    init_from: InputPath | None = None
    """Checkpoint or exported draft whose weights (not optimizer or step) a run starts from."""


class MarkovConfig(Config):
    """The Markov head: a low-rank logit bias from the previous token."""

    head: Literal["vanilla", "gated", "rnn"] = "vanilla"
    """`vanilla`: W2 W1[prev]; `gated`: a sigmoid gate of the state and the embedding; `rnn`: a gated state over the block."""
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
    """Token that fills the slots behind the anchor; default: the tokenizer's mask token. Must not occur in data."""
    sliding_window: PositiveInt | None = None
    """Context tokens that a slot sees, itself included; None sees all."""


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

    @model_validator(mode="after")
    def _confidence_needs_its_head(self) -> "DSparkConfig":
        if not self.confidence.enabled and self.loss.confidence and "confidence" in self.loss.model_fields_set:
            raise ValueError("loss.confidence is set, but confidence.enabled is false: drop one of the two")
        return self


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


DraftConfig = Annotated[DSparkConfig | DFlashConfig | Eagle3Config, Field(discriminator="method")]
"""The draft's method and its settings."""


def default_layer_ids(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """`count` post-layer ids spread evenly from layer 1 to the third from last, as the DFlash and DSpark papers do.

    36 layers give (1, 9, 17, 25, 33). A target too shallow for that gives up to `count` of its layers before the last.
    """
    first, last = 1, num_target_layers - 3
    if last < count:
        first, last = 0, max(num_target_layers - 2, 0)
    count = min(count, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))
