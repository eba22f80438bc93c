"""DSpark's objective and the metrics of a step (arXiv 2607.05147).

    loss = Σ_slots w (ce·CE + l1·L1 + confidence·BCE) / Σ w        both sums over the world

The numerators come from the kernel; here they meet their denominators. The acceptance length is estimated as
the mean over blocks of `1 + Σ_k Π_{i<=k} a_i`, with a_i = 1 - L1/2, the probability that slot i is accepted.
"""

import torch
from torch import Tensor

from specforge_config.draft import DSparkLossConfig
from specforge_kernels.dspark_objective.api import DSparkLossWeights, dspark_objective
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import StepTerms
from specforge_train.methods.dspark.features import DSparkInputs


def step_terms(
    states: Tensor,
    features: Tensor,
    confidence: Tensor | None,
    w2: Tensor,
    last_hidden: Tensor,
    frozen: FrozenTarget,
    inputs: DSparkInputs,
    loss: DSparkLossConfig,
) -> StepTerms:
    """Loss and metrics of a micro-batch.

    Args:
        states: [M, H] of the draft, after its final norm.
        features: [M, R] of the Markov head.
        confidence: [M] logits, None without the head.
        w2: [V, R] of the Markov head.
        last_hidden: [T, H] final states of the target.
        frozen: holds the target's head.
        inputs: of this micro-batch.
        loss: weights of the terms.
    """
    dtype = frozen.head.dtype
    terms = dspark_objective(
        states.to(dtype),
        features.to(dtype),
        confidence,
        frozen.head,
        w2.to(dtype),
        last_hidden.to(dtype),
        inputs.teacher,
        inputs.labels,
        inputs.weights,
        DSparkLossWeights(loss.ce, loss.l1, loss.confidence if confidence is not None else 0.0),
    )
    total = terms.loss
    if inputs.weight_sum == 0:
        # Nothing counts: tie the loss to all its inputs, or parameters here alone would lack a gradient.
        total = total + sum(x[:0].sum() for x in (states, features, w2, confidence) if x is not None)
    blocks = inputs.counts[-1]
    acceptance = terms.acceptance.view(-1, inputs.block)
    by_slot = acceptance.sum(0)
    weight = torch.full_like(blocks, inputs.weight_sum)
    sums = {
        "loss": (total.detach(), weight),
        "loss/ce": (terms.ce, weight),
        "loss/l1": (terms.l1, weight),
        "loss/confidence": (terms.confidence, weight),
        "tau_estimate": (blocks + acceptance.cumprod(1).sum(), blocks),
        "accuracy": (terms.correct.sum(), inputs.counts[:-1].sum()),
    }
    sums |= {f"accept/{k}": (by_slot[k], inputs.counts[k]) for k in range(inputs.block)}
    return StepTerms(total, sums)
