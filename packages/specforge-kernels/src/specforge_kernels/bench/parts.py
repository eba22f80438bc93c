"""Times each operation alone, forward and backward, on random data of a draft model's shapes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..anchored_attention.api import anchored_attention, build_layout
from ..dspark_objective.api import DSparkLossWeights, dspark_objective
from ..policy import choose_attention, choose_objective

HEAD_DIM, GROUP, MARKOV_RANK = 128, 4, 256


@dataclass(frozen=True)
class PartShapes:
    """Sizes that stay the same over the lengths."""

    anchors: int
    """Anchors of a sequence at most; fewer where a sequence has fewer positions."""
    block: int
    hidden: int
    vocabulary: int


def print_parts(shapes: PartShapes, lengths: Sequence[int], device: torch.device, seed: int) -> None:
    """A line a length and operation: milliseconds of forward + backward, and what its peak adds on CUDA."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention, objective = (
        choose_attention(device, dtype, HEAD_DIM, GROUP, shapes.block),
        choose_objective(device, dtype),
    )
    print(f"{'tokens':>7} {'slots':>6}  {'operation':<36} {'ms':>9} {'extra GiB':>10}")
    for tokens in lengths:
        anchors = torch.randperm(max(1, tokens - 1))[: shapes.anchors].sort().values
        for name, step in (
            (f"layout ({attention.name})", _layout_step(shapes, tokens, anchors, device)),
            (
                f"anchored_attention ({attention.name})",
                _attention_step(shapes, tokens, anchors, device, dtype),
            ),
            (f"dspark_objective ({objective.name})", _objective_step(shapes, tokens, anchors, device, dtype)),
        ):
            milliseconds, extra = measure(step, device)
            slots = anchors.numel() * shapes.block
            memory = f"{extra / 2**30:10.2f}" if device.type == "cuda" else f"{'-':>10}"
            print(f"{tokens:>7} {slots:>6}  {name:<36} {milliseconds:>9.2f} {memory}")


def measure(step: Callable[[], object], device: torch.device, repeats: int = 5) -> tuple[float, int]:
    """Median milliseconds of `step` after two warm-up calls; bytes its peak adds on CUDA, 0 elsewhere."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step(), step()
    synchronize()
    held = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    extra = torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0
    return median(times), extra


def _layout_step(
    shapes: PartShapes, tokens: int, anchors: Tensor, device: torch.device
) -> Callable[[], object]:
    offsets = torch.tensor([0, tokens])
    return lambda: build_layout(offsets, anchors, shapes.block, device=device)


def _attention_step(
    shapes: PartShapes, tokens: int, anchors: Tensor, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    heads = max(GROUP, shapes.hidden // HEAD_DIM)
    slots = anchors.numel() * shapes.block
    layout = build_layout(torch.tensor([0, tokens]), anchors, shapes.block, device=device)
    rows = ((slots, heads), (tokens, heads // GROUP), (tokens, heads // GROUP), (slots, heads // GROUP))
    q, kc, vc, kb = (torch.randn(*r, HEAD_DIM, device=device, dtype=dtype, requires_grad=True) for r in rows)
    vb, upstream = torch.randn_like(kb, requires_grad=True), torch.randn_like(q)
    inputs = (q, kc, vc, kb, vb)
    return lambda: torch.autograd.grad(anchored_attention(*inputs, layout), inputs, upstream)


def _objective_step(
    shapes: PartShapes, tokens: int, anchors: Tensor, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, device=device)).to(dtype)

    slots, vocabulary = anchors.numel() * shapes.block, shapes.vocabulary
    head, last = normal(vocabulary, shapes.hidden, scale=0.02), normal(tokens, shapes.hidden)
    w2 = normal(vocabulary, MARKOV_RANK, scale=0.02).requires_grad_()
    hidden, markov = (
        normal(slots, shapes.hidden).requires_grad_(),
        normal(slots, MARKOV_RANK).requires_grad_(),
    )
    confidence = torch.randn(slots, device=device, requires_grad=True)
    position = (anchors[:, None] + torch.arange(shapes.block)).reshape(-1)
    # Slots past the end of the sequence do not count.
    weights = torch.exp(-torch.arange(shapes.block) / 4).repeat(anchors.numel()) * (position + 1 < tokens)
    labels = torch.randint(0, vocabulary, (slots,))

    def step() -> object:
        terms = dspark_objective(
            hidden, markov, confidence, head, w2, last, position, labels, weights, DSparkLossWeights()
        )
        return torch.autograd.grad(terms.loss, (hidden, markov, w2, confidence))

    return step
