"""The DSpark objective with fused kernels: loss terms, metrics and gradients, all in forward.

Over a chunk of slots, `z` are the draft's logits and `t` the teacher's, kept in the model's dtype only. One
program a slot reads its row three times: for the log-sum-exp; for CE, L1 and `s = Σ_u p_u sign(p_u - q_u)`;
and to write, over the private `z`,

    ∂loss/∂z_v = w (ce (p_v - [v = label]) + l1 p_v (sign(p_v - q_v) - s))

with p and q in fp32 from z, t and their log-sum-exps. The products of this gradient with the head and the
Markov matrix give the gradients of the hidden states and the Markov factors, so that backward only scales
them: neither head nor logits are computed again. A row belongs to one program and sums have a fixed order:
the result is deterministic.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..warm_up import Launches
from .terms import DSparkLossWeights, DSparkTerms, SlotChunk, slot_chunks

CHUNK_SLOTS = 2048
"""Slots of a chunk: at V = 151936 in bf16, 0.58 GiB of draft logits and at most as much of teacher logits."""
COLUMNS = 4096
"""Logits a program holds at once."""
WARPS = 16

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# Below any logit, yet finite: differences of two of them stay free of NaN.
LOWEST: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def _scaled_logits(row_ptr, column, vocabulary):
    """Logits in units of log 2, fp32; LOWEST past the vocabulary."""
    x = tl.load(row_ptr + column, mask=column < vocabulary, other=LOWEST)
    return x.to(tl.float32) * LOG2E


@triton.jit
def _row_statistics(row_ptr, vocabulary, FIRST: tl.constexpr, COLUMNS: tl.constexpr):
    """Log-sum-exp and maximum of one row, in units of log 2; with FIRST also the maximum's first column.

    Each lane runs its own softmax over its columns, so that the loop needs no reduction across lanes.
    """
    highest = tl.full([COLUMNS], LOWEST, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    first = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        x = _scaled_logits(row_ptr, column, vocabulary)
        above = x - highest
        small = tl.exp2(-tl.abs(above))
        total = tl.where(above > 0, total * small + 1.0, total + small)
        highest = tl.maximum(highest, x)
        if FIRST:
            first = tl.where(above > 0, column, first)
    top = tl.max(highest, axis=0)
    log_sum = top + tl.log2(tl.sum(total * tl.exp2(highest - top), axis=0))
    return log_sum, top, tl.min(tl.where(highest == top, first, vocabulary), axis=0)


@triton.jit
def _teacher_kernel(t_ptr, log_sum_ptr, first_ptr, vocabulary, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    log_sum, _, first = _row_statistics(t_ptr + row * vocabulary, vocabulary, True, COLUMNS)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(first_ptr + row, first)


@triton.jit(do_not_specialize=["rows"])
def _slot_kernel(
    z_ptr, t_ptr, teacher_of_ptr, teacher_log_sum_ptr, teacher_first_ptr,
    slot_ptr, label_ptr, weight_ptr, confidence_ptr,
    terms_ptr, acceptance_ptr, correct_ptr, confidence_grad_ptr,
    vocabulary, rows, ce_factor, l1_factor, confidence_factor,
    CONFIDENCE: tl.constexpr, GRADIENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One slot: its weighted CE, L1 and BCE into terms [3, rows], its metrics, and its gradients."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + row)
    label = tl.load(label_ptr + row)
    weight = tl.load(weight_ptr + row)
    teacher = tl.load(teacher_of_ptr + row).to(tl.int64)
    z_ptr += row * vocabulary
    t_ptr += teacher * vocabulary
    q_log_sum = tl.load(teacher_log_sum_ptr + teacher)

    p_log_sum, highest, _ = _row_statistics(z_ptr, vocabulary, False, COLUMNS)
    ce = (p_log_sum - tl.load(z_ptr + label).to(tl.float32) * LOG2E) * LN2
    at_teacher_first = tl.load(z_ptr + tl.load(teacher_first_ptr + teacher)).to(tl.float32) * LOG2E

    l1_lanes = tl.zeros([COLUMNS], tl.float32)
    signed_lanes = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocabulary, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        log_p = _scaled_logits(z_ptr, column, vocabulary) - p_log_sum
        log_q = _scaled_logits(t_ptr, column, vocabulary) - q_log_sum
        p = tl.exp2(log_p)
        sign = tl.where(log_p > log_q, 1.0, tl.where(log_p < log_q, -1.0, 0.0))
        l1_lanes += (p - tl.exp2(log_q)) * sign
        signed_lanes += p * sign
    l1 = tl.sum(l1_lanes, axis=0)
    signed = tl.sum(signed_lanes, axis=0)

    acceptance = tl.minimum(tl.maximum(1.0 - 0.5 * l1, 0.0), 1.0)
    tl.store(terms_ptr + row, weight * ce)
    tl.store(terms_ptr + rows + row, weight * l1)
    tl.store(acceptance_ptr + slot, acceptance)
    tl.store(correct_ptr + slot, at_teacher_first >= highest)
    if CONFIDENCE:
        c = tl.load(confidence_ptr + slot).to(tl.float32)
        # softplus(c) - a c, with the exponential of a negative number only
        small = tl.exp(-tl.abs(c))
        bce = tl.maximum(c, 0.0) + tl.log(1.0 + small) - acceptance * c
        tl.store(terms_ptr + 2 * rows + row, weight * bce)
        sigmoid = tl.where(c >= 0, 1.0, small) / (1.0 + small)
        tl.store(confidence_grad_ptr + slot, weight * confidence_factor * (sigmoid - acceptance))

    if GRADIENT:
        on_p = weight * (ce_factor - l1_factor * signed)
        on_sign = weight * l1_factor
        at_label = weight * ce_factor
        for start in range(0, vocabulary, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            log_p = _scaled_logits(z_ptr, column, vocabulary) - p_log_sum
            log_q = _scaled_logits(t_ptr, column, vocabulary) - q_log_sum
            sign = tl.where(log_p > log_q, 1.0, tl.where(log_p < log_q, -1.0, 0.0))
            gradient = tl.exp2(log_p) * (on_p + on_sign * sign) - tl.where(column == label, at_label, 0.0)
            tl.store(z_ptr + column, gradient.to(z_ptr.dtype.element_ty), mask=column < vocabulary)


@dataclass
class _Filled:
    """What the chunks fill in, of all M slots: metrics, and gradients."""

    acceptance: Tensor
    correct: Tensor
    confidence: Tensor | None
    hidden: Tensor
    markov: Tensor | None
    w2: Tensor | None
    """fp32, once a chunk has added to it."""


class _Objective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        markov: Tensor | None,
        confidence_logits: Tensor | None,
        head: Tensor,
        w2: Tensor | None,
        last_hidden: Tensor,
        chunks: list[SlotChunk],
        factors: DSparkLossWeights,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        filled = _Filled(
            acceptance=hidden.new_zeros(hidden.shape[0], dtype=torch.float32),
            correct=hidden.new_zeros(hidden.shape[0], dtype=torch.bool),
            confidence=None if confidence_logits is None else torch.zeros_like(confidence_logits),
            hidden=torch.zeros_like(hidden),
            markov=None if markov is None else torch.zeros_like(markov),
            w2=None,
        )
        gradient = any(ctx.needs_input_grad)
        terms = [hidden.new_zeros(3, 0, dtype=torch.float32)]
        for chunk in chunks:
            z, t = _logits(hidden, markov, head, w2, last_hidden, chunk)
            statistics = _teacher_statistics(t)
            terms.append(_chunk_terms(z, t, statistics, confidence_logits, chunk, factors, gradient, filled))
            del t
            if gradient:
                _project_gradient(z, markov, head, w2, chunk, filled)
        sums = torch.cat(terms, dim=1).sum(dim=1)
        loss = factors.ce * sums[0] + factors.l1 * sums[1] + factors.confidence * sums[2]
        if w2 is not None:
            filled.w2 = torch.zeros_like(w2) if filled.w2 is None else filled.w2.to(w2.dtype)
        ctx.save_for_backward(filled.hidden, filled.markov, filled.confidence, filled.w2)
        ctx.mark_non_differentiable(sums, filled.acceptance, filled.correct)
        return loss, sums, filled.acceptance, filled.correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, markov, confidence, w2 = (x if x is None else x * loss.to(x.dtype) for x in ctx.saved_tensors)
        return hidden, markov, confidence, None, w2, None, None, None


def _logits(
    hidden: Tensor,
    markov: Tensor | None,
    head: Tensor,
    w2: Tensor | None,
    last_hidden: Tensor,
    chunk: SlotChunk,
) -> tuple[Tensor, Tensor]:
    """Draft logits [m, V] and teacher logits [t, V] of a chunk."""
    z = hidden.index_select(0, chunk.slots) @ head.T
    if markov is not None and w2 is not None:
        z.addmm_(markov.index_select(0, chunk.slots), w2.T)
    return z, last_hidden.index_select(0, chunk.teacher_rows) @ head.T


def _teacher_statistics(t: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp [t] fp32, in units of log 2, and first maximum [t] int32 of each row."""
    rows, vocabulary = t.shape
    log_sum, first = t.new_empty(rows, dtype=torch.float32), t.new_empty(rows, dtype=torch.int32)
    kernel: Any = _teacher_kernel[(rows,)]
    kernel(t, log_sum, first, vocabulary, COLUMNS=COLUMNS, num_warps=WARPS)
    return log_sum, first


def _chunk_terms(
    z: Tensor,
    t: Tensor,
    statistics: tuple[Tensor, Tensor],
    confidence_logits: Tensor | None,
    chunk: SlotChunk,
    factors: DSparkLossWeights,
    gradient: bool,
    filled: _Filled,
) -> Tensor:
    """Weighted CE, L1 and BCE [3, m]; with `gradient`, `z` becomes the gradient of the logits."""
    rows, vocabulary = z.shape
    terms = z.new_zeros(3, rows, dtype=torch.float32)
    slots: Any = _slot_kernel[(rows,)]
    slots(
        z, t, chunk.teacher_of, *statistics,
        chunk.slots, chunk.labels, chunk.weights, confidence_logits,
        terms, filled.acceptance, filled.correct, filled.confidence,
        vocabulary, rows, factors.ce, factors.l1, factors.confidence,
        CONFIDENCE=confidence_logits is not None, GRADIENT=gradient, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return terms


def _project_gradient(
    z: Tensor, markov: Tensor | None, head: Tensor, w2: Tensor | None, chunk: SlotChunk, filled: _Filled
) -> None:
    """Gradients of a chunk's hidden states, Markov features and of the Markov matrix, from its logits'."""
    filled.hidden.index_copy_(0, chunk.slots, z @ head)
    if markov is None or w2 is None or filled.markov is None:
        return
    filled.markov.index_copy_(0, chunk.slots, z @ w2)
    features = markov.index_select(0, chunk.slots)
    # Chunks add up in fp32: a bf16 sum would lose the later ones.
    part = torch.mm(z.T, features, out_dtype=torch.float32) if z.is_cuda else (z.T @ features).float()
    filled.w2 = part if filled.w2 is None else filled.w2.add_(part)


def objective_triton(
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
    bounds = (last_hidden.shape[0], head.shape[0])
    chunks = list(slot_chunks(teacher_index, labels, weights, CHUNK_SLOTS, hidden.device, bounds))
    loss, sums, acceptance, correct = _Objective.apply(
        hidden, markov, confidence_logits, head, w2, last_hidden, chunks, loss_weights
    )
    return DSparkTerms(loss, *sums, acceptance, correct)


def warm_up_objective(
    vocabulary: int, confidence: bool, dtype: torch.dtype, device: torch.device
) -> Launches:
    """Launches of each kernel with its gradient, for `warm_up.WarmUp`."""
    z, t = (torch.zeros(1, vocabulary, dtype=dtype, device=device) for _ in range(2))
    index = torch.zeros(1, dtype=torch.int64, device=device)
    value, teacher_of = torch.zeros(1, device=device), index.int()
    chunk = SlotChunk(index, index, value, teacher_of, teacher_of)
    logits = torch.zeros(1, device=device) if confidence else None
    filled = _Filled(value.clone(), value.bool(), logits, z, None, None)
    return (
        lambda: _teacher_statistics(t),
        lambda: _chunk_terms(z, t, (value, teacher_of), logits, chunk, DSparkLossWeights(), True, filled),
    )
