"""Floating-point operations of a DSpark micro-step, for model FLOP utilisation.

Counted are the matrix products that the mathematics needs, once each: 2·m·n·k for a forward product, the same
for each of the two gradients that are needed. Frozen or captured operands need one gradient less. Attention
counts visible pairs only, and its backward 2.5 times its forward (as in FlashAttention, arXiv 2205.14135).
Recomputation and element-wise work count nothing.
"""

import torch

from specforge_config.draft import DSparkConfig
from specforge_train.methods.base import DraftShape
from specforge_train.methods.dspark.features import DSparkInputs

FORWARD, BOTH_GRADIENTS, ONE_GRADIENT = 1, 3, 2
"""Multiples of a forward product: alone, with both gradients, with one of them."""


def visible_pairs(inputs: DSparkInputs) -> int:
    """(slot, key) pairs of one head of one layer."""
    anchors = inputs.block_positions.view(-1, inputs.block)[:, 0].long()
    slot = torch.arange(inputs.block)
    if inputs.window is None:
        return int((anchors * inputs.block).sum()) + anchors.numel() * inputs.block**2
    context = torch.minimum(anchors[:, None], (inputs.window - 1 - slot).clamp(min=0))
    return int(context.sum()) + anchors.numel() * int((slot + 1).sum())


def step_flops(shape: DraftShape[DSparkConfig], inputs: DSparkInputs) -> float:
    """Operations of the forward and backward of one micro-step.

    Args:
        shape: the draft's sizes.
        inputs: on the host.
    """
    tokens, slots = inputs.context_positions.numel(), inputs.ids.numel()
    counted = inputs.weights > 0
    supervised, taught = int(counted.sum()), int(inputs.teacher[counted].unique().numel())
    hidden, vocabulary, rank = shape.hidden_size, shape.vocab_size, shape.config.markov.rank
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = (
        BOTH_GRADIENTS * slots * hidden * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
        + BOTH_GRADIENTS * tokens * hidden * 2 * keys
        + 3.5 * visible_pairs(inputs) * 2 * queries
    )
    products = (
        shape.num_layers * layer
        + ONE_GRADIENT * tokens * len(shape.layer_ids) * hidden * hidden
        + ONE_GRADIENT * supervised * hidden * vocabulary
        + FORWARD * taught * hidden * vocabulary
        + BOTH_GRADIENTS * supervised * rank * vocabulary
    )
    return 2.0 * products
