"""Small DSpark drafts and packed batches with random states, in float64 so that rounding hides nothing."""

from collections.abc import Sequence
from typing import Any

import torch

from specforge_config.draft import DSparkConfig
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.target import TargetShape
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftShape
from specforge_train.methods.dspark import DSpark

VOCABULARY, HIDDEN, MASK = 40, 16, 39
TARGET = TargetShape(
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    max_positions=128,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    dtype="float32",
    tied_head=False,
)


def make_shape(**draft: Any) -> DraftShape[DSparkConfig]:
    """A draft of two layers and blocks of four; keywords are fields of the draft section."""
    fields = {"num_layers": 2, "target_layer_ids": (1, 4), "block_size": 4, "init_std": 0.3} | draft
    return DSpark().resolve(DSparkConfig.model_validate(fields), TARGET, MASK)


def make_batch(masks: Sequence[Sequence[int]], layers: int = 2, seed: int = 0) -> FeatureBatch:
    """A packed batch of documents with these loss masks."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(mask) for mask in masks]
    rows = sum(lengths)
    spec = CaptureSpec(
        method="dspark",
        layer_ids=tuple(range(layers)),
        final_state=True,
        dtype="float32",
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        target_revision="r",
        tokenizer_hash="t",
    )
    return FeatureBatch(
        tokens=torch.randint(0, MASK, (rows,), generator=generator),
        loss_mask=torch.tensor([bool(x) for mask in masks for x in mask]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        hidden=torch.randn(rows, layers * HIDDEN, dtype=torch.float64, generator=generator),
        last_hidden=torch.randn(rows, HIDDEN, dtype=torch.float64, generator=generator),
        sample_ids=tuple(f"sample-{i}" for i in range(len(masks))),
        positions=tuple((0, i) for i in range(len(masks))),
        spec=spec,
    )


def frozen_target() -> FrozenTarget:
    """A random embedding and head."""
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    return FrozenTarget(embedding, head)
