"""The DSpark objective in plain torch: the definition that the fused one is tested against, and what CPUs
run.

    z_m = W h_m + W2 e_m,  p = softmax(z),  q = softmax(W t)                  draft and teacher distributions
    of slot m CE = -log p[label],  L1 = Σ_v |p_v - q_v|,  a = clamp(1 - L1/2, 0, 1),  BCE = BCE(sigmoid(c),
    a), a held constant loss = Σ_m w_m (ce·CE + l1·L1 + confidence·BCE)

Source: DSpark (arXiv 2607.05147). The slots go in chunks, each recomputed in backward, so that no [M, V] fp32
tensor of all slots lives.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .terms import DSparkLossWeights, DSparkTerms, SlotChunk, slot_chunks

CHUNK_ELEMENTS = 2**25
"""Logits of a chunk: 128 MiB in fp32, of which about six live at once."""


def objective_reference(
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
    """Arguments as `api.dspark_objective`."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    bounds = (last_hidden.shape[0], head.shape[0])
    size = max(1, CHUNK_ELEMENTS // head.shape[0])
    chunks = list(slot_chunks(teacher_index, labels, weights, size, hidden.device, bounds))
    acceptance = hidden.new_zeros(hidden.shape[0], dtype=dtype)
    correct = torch.zeros(hidden.shape[0], dtype=torch.bool, device=hidden.device)
    # An empty selection keeps the loss connected to its inputs, with zero gradients, when no slot counts.
    sums = hidden[:0].sum(dtype=dtype) + torch.zeros(3, dtype=dtype, device=hidden.device)
    for chunk in chunks:
        inputs = (hidden, markov, confidence_logits, head, w2, last_hidden, chunk)
        if len(chunks) == 1:
            chunk_sums, chunk_acceptance, chunk_correct = _chunk_terms(*inputs)
        else:
            chunk_sums, chunk_acceptance, chunk_correct = checkpoint(
                _chunk_terms, *inputs, use_reentrant=False, preserve_rng_state=False
            )
        sums = sums + chunk_sums
        acceptance[chunk.slots] = chunk_acceptance
        correct[chunk.slots] = chunk_correct
    ce, l1, confidence = sums
    loss = loss_weights.ce * ce + loss_weights.l1 * l1 + loss_weights.confidence * confidence
    return DSparkTerms(loss, ce.detach(), l1.detach(), confidence.detach(), acceptance, correct)


def _chunk_terms(
    hidden: Tensor,
    markov: Tensor | None,
    confidence_logits: Tensor | None,
    head: Tensor,
    w2: Tensor | None,
    last_hidden: Tensor,
    chunk: SlotChunk,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [3] of w·CE, w·L1, w·BCE; acceptance [m] and correct [m], detached."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden[chunk.slots] @ head.T
    if markov is not None and w2 is not None:
        logits = logits + markov[chunk.slots] @ w2.T
    log_p = logits.to(dtype).log_softmax(dim=-1)
    with torch.no_grad():
        teacher = (last_hidden[chunk.teacher_rows] @ head.T).to(dtype).softmax(dim=-1)
        first = teacher.argmax(dim=-1)[chunk.teacher_of]
        correct = log_p.gather(1, first[:, None]).squeeze(1) == log_p.amax(dim=-1)
    ce = -log_p.gather(1, chunk.labels[:, None]).squeeze(1)
    l1 = (log_p.exp() - teacher[chunk.teacher_of]).abs().sum(dim=-1)
    acceptance = (1 - l1.detach() / 2).clamp(0, 1)
    if confidence_logits is None:
        bce = torch.zeros_like(ce)
    else:
        confidence = confidence_logits[chunk.slots].to(dtype)
        bce = F.binary_cross_entropy_with_logits(confidence, acceptance, reduction="none")
    sums = torch.stack([ce, l1, bce]) @ chunk.weights.to(dtype)
    return sums, acceptance, correct
