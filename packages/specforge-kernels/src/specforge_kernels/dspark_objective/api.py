"""DSpark's training objective: draft hidden states in; loss, metrics and gradients out."""

from torch import Tensor

from ..policy import choose_objective
from .reference import objective_reference
from .terms import DSparkLossWeights, DSparkTerms

__all__ = ["DSparkLossWeights", "DSparkTerms", "dspark_objective"]


def dspark_objective(
    hidden: Tensor,
    markov: Tensor | None,
    confidence_logits: Tensor | None,
    head: Tensor,
    w2: Tensor | None,
    last_hidden: Tensor,
    teacher_index: Tensor,
    labels: Tensor,
    weights: Tensor,
    loss_weights: DSparkLossWeights,
) -> DSparkTerms:
    """Loss terms of M slots; gradients go to `hidden`, `markov`, `w2` and `confidence_logits`.

    Slots of weight 0 cost nothing, and their teacher rows and labels are not read.

    Args:
        hidden: [M, H] draft states after the draft's final norm.
        markov: [M, R] Markov features of the token before each slot, or None without a Markov head.
        confidence_logits: [M] or None without a confidence head.
        head: [V, H] the target's vocabulary head, frozen.
        w2: [V, R] the Markov head's output matrix, None with `markov`.
        last_hidden: [T, H] the target's post-norm final states.
        teacher_index: [M] int64, on the host: the row of `last_hidden` whose head logits teach the slot.
        labels: [M] int64, on the host: the data token the slot predicts.
        weights: [M] fp32, on the host: 0 for a slot that does not count. (Device tensors work, but stop the
            host once a step.)
        loss_weights: factors of the three losses.

    Raises:
        ValueError: shapes that disagree, or a label or teacher row of a weighted slot out of range.
    """
    _check_shapes(hidden, markov, confidence_logits, head, w2, last_hidden)
    for name, value in (("teacher_index", teacher_index), ("labels", labels), ("weights", weights)):
        if value.shape != hidden.shape[:1]:
            raise ValueError(
                f"{name} must hold one value a slot, {hidden.shape[0]}, found {tuple(value.shape)}"
            )
    if choose_objective(hidden.device, hidden.dtype).name == "triton":
        from .triton import objective_triton as objective
    else:
        objective = objective_reference
    return objective(
        hidden, markov, confidence_logits, head, w2, last_hidden, teacher_index, labels, weights, loss_weights
    )


def _check_shapes(
    hidden: Tensor,
    markov: Tensor | None,
    confidence_logits: Tensor | None,
    head: Tensor,
    w2: Tensor | None,
    last_hidden: Tensor,
) -> None:
    slots, width = hidden.shape
    if head.shape[1] != width or last_hidden.shape[1] != width:
        found = ", ".join(str(tuple(x.shape)) for x in (hidden, head, last_hidden))
        raise ValueError(f"hidden, head and last_hidden must agree in their last dimension, found {found}")
    if markov is None or w2 is None:
        if markov is not None or w2 is not None:
            raise ValueError("markov and w2 come together: give both or neither")
    elif markov.shape[0] != slots or w2.shape != (head.shape[0], markov.shape[1]):
        raise ValueError(
            f"markov must be [{slots}, R] and w2 [{head.shape[0]}, R], "
            f"found {tuple(markov.shape)} and {tuple(w2.shape)}"
        )
    if confidence_logits is not None and confidence_logits.shape != (slots,):
        raise ValueError(f"confidence_logits must be [{slots}], found {tuple(confidence_logits.shape)}")
