"""The layer's backends against its definition in float64, values and all gradients, at ragged sizes."""

import os

import pytest
import torch
from torch import Tensor

from specforge_kernels.draft_layer.api import (
    AttentionWeights,
    OutputWeights,
    Rotary,
    after_attention,
    before_attention,
    rms_norm,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# (backend, device, dtype, bound on the relative error)
PLACES = [("reference", "cpu", torch.float32, 1e-5)]
if INTERPRETED:
    PLACES = [("triton", "cpu", torch.float32, 1e-5), ("triton", "cpu", torch.bfloat16, 2e-2)]
elif torch.cuda.is_available():
    PLACES += [("triton", "cuda", torch.float32, 1e-5), ("triton", "cuda", torch.bfloat16, 2e-2)]

SIZES = {
    # slots, context tokens, hidden, intermediate, query heads, key heads, head dimension
    "gqa": (13, 9, 40, 72, 4, 2, 16),
    "mha-wide": (5, 1, 96, 2100, 3, 3, 32),
    "one-slot": (1, 7, 24, 24, 2, 1, 16),
}
EPS = 1e-5


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    """Values that bf16 holds exactly, so that all types start from the same ones."""
    return (scale * torch.randn(*shape)).bfloat16().double()


def tables(rows: int, dim: int) -> Rotary:
    # Scaled, as YaRN scales its tables.
    angle = torch.rand(rows, dim // 2) * 6
    return Rotary(1.2 * angle.cos(), 1.2 * angle.sin())


def attention_case(
    slots: int, tokens: int, hidden: int, heads: int, key_heads: int, dim: int
) -> tuple[list[Tensor], list[Rotary]]:
    widths = (heads * dim, key_heads * dim, key_heads * dim)
    matrices = [drawn(width, hidden, scale=hidden**-0.5) for width in widths]
    norms = [1 + drawn(n, scale=0.3) for n in (hidden, dim, dim)]
    leaves = [drawn(slots, hidden), drawn(tokens, hidden), norms[0], *matrices, *norms[1:]]
    return leaves, [tables(slots, dim), tables(tokens, dim)]


def before(leaves: list[Tensor], rotary: list[Rotary], backend: str) -> list[Tensor]:
    x, context, *weights = leaves
    return list(before_attention(x, context, AttentionWeights(*weights), *rotary, EPS, backend=backend))


def output_case(slots: int, hidden: int, intermediate: int, heads: int, dim: int) -> list[Tensor]:
    return [
        drawn(slots, hidden),
        drawn(slots, heads, dim),
        drawn(hidden, heads * dim, scale=(heads * dim) ** -0.5),
        1 + drawn(hidden, scale=0.3),
        *(drawn(intermediate, hidden, scale=hidden**-0.5) for _ in range(2)),
        drawn(hidden, intermediate, scale=intermediate**-0.5),
    ]


def after(leaves: list[Tensor], backend: str) -> list[Tensor]:
    x, attended, *weights = leaves
    return [after_attention(x, attended, OutputWeights(*weights), EPS, backend=backend)]


def compare(run, leaves: list[Tensor], place) -> None:
    """Outputs and gradients of `run(leaves, backend)` in float64 and as `place` has them."""
    backend, device, dtype, bound = place
    exact = [x.detach().clone().requires_grad_() for x in leaves]
    wanted = run(exact, "reference")
    upstream = [drawn(*y.shape) for y in wanted]
    wanted_gradients = torch.autograd.grad(wanted, exact, upstream)
    inputs = [x.to(device, dtype).requires_grad_() for x in leaves]
    found = run(inputs, backend)
    gradients = torch.autograd.grad(found, inputs, [u.to(device, dtype) for u in upstream])
    for index, (x, reference) in enumerate(
        zip((*found, *gradients), (*wanted, *wanted_gradients), strict=True)
    ):
        assert x.dtype == dtype
        assert x.shape == reference.shape
        error = (x.double().cpu() - reference).norm() / reference.norm()
        assert error <= bound, (index, error.item())


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(str(x) for x in place[:3]))
@pytest.mark.parametrize("size", SIZES)
def test_before_the_attention(size: str, place) -> None:
    torch.manual_seed(0)
    slots, tokens, hidden, _, *heads = SIZES[size]
    leaves, rotary = attention_case(slots, tokens, hidden, *heads)
    device = place[1]
    on_device = [Rotary(*(x.to(device) for x in r)) for r in rotary]
    compare(
        lambda inputs, backend: before(
            inputs, rotary if inputs[0].dtype == torch.float64 else on_device, backend
        ),
        leaves,
        place,
    )


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(str(x) for x in place[:3]))
@pytest.mark.parametrize("size", SIZES)
def test_after_the_attention(size: str, place) -> None:
    torch.manual_seed(1)
    slots, _, hidden, intermediate, heads, _, dim = SIZES[size]
    compare(after, output_case(slots, hidden, intermediate, heads, dim), place)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(str(x) for x in place[:3]))
def test_norm(place) -> None:
    torch.manual_seed(2)
    leaves = [drawn(11, 40), 1 + drawn(40, scale=0.3)]
    compare(lambda inputs, backend: [rms_norm(*inputs, EPS, backend=backend)], leaves, place)


@pytest.mark.parametrize("place", PLACES[-1:], ids=lambda place: place[0])
def test_two_runs_are_bitwise_equal_and_gradients_are_not_copied(place) -> None:
    backend, device, dtype, _ = place
    torch.manual_seed(3)
    leaves = [x.to(device, dtype).requires_grad_() for x in output_case(13, 40, 72, 4, 16)]
    upstream = torch.randn(13, 40).to(device, dtype)
    first, second = (torch.autograd.grad(after(leaves, backend), leaves, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Autograd keeps a gradient as it comes only if it is laid out like its parameter.
    assert all(gradient.stride() == leaf.stride() for gradient, leaf in zip(first, leaves, strict=True))


def test_wrong_arguments_are_refused() -> None:
    leaves, rotary = attention_case(3, 2, 24, 2, 1, 16)
    with pytest.raises(ValueError, match="unknown layer backend 'fast'"):
        before(leaves, rotary, "fast")
    with pytest.raises(ValueError, match="context_rotary must hold a row for each of 2 positions"):
        before(leaves, [rotary[0], rotary[0]], "reference")
