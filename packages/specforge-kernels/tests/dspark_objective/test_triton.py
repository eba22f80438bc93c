"""The fused objective against its definition in float64: on a GPU, or through Triton's interpreter."""

import os

import pytest
import torch

from specforge_kernels.dspark_objective.api import DSparkLossWeights

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
triton = pytest.importorskip("specforge_kernels.dspark_objective.triton")
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1 (test_interpreter.py)",
)

DEVICE = "cpu" if INTERPRETED else "cuda"
FACTORS = DSparkLossWeights(ce=0.3, l1=0.8, confidence=0.6)
# bf16 logits carry 8 bits, and the sign of p - q flips where the two are that close: with a few hundred
# tokens this weighs more than at a real vocabulary, where the bound is 1e-2.
PRECISIONS = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check(case, plain_objective, bound) -> None:
    loss, metrics = plain_objective(case, FACTORS)
    wanted = torch.autograd.grad(loss, case.trained)
    terms = triton.objective_triton(*case.arguments, FACTORS)
    found = torch.autograd.grad(terms.loss, case.trained)
    for name in ("ce", "l1", "confidence"):
        assert abs(getattr(terms, name).item() - metrics[name].item()) <= bound * abs(metrics[name].item()), (
            name
        )
    assert relative(terms.loss.detach(), loss.detach()) < bound
    assert relative(terms.acceptance, metrics["acceptance"]) < bound
    for gradient, reference in zip(found, wanted, strict=True):
        assert relative(gradient, reference) < bound


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS)
@pytest.mark.parametrize("with_heads", [True, False])
@pytest.mark.parametrize("chunk", [2048, 5])
def test_values_and_gradients(
    dtype, bound, with_heads, chunk, monkeypatch, draw_case, plain_objective
) -> None:
    monkeypatch.setattr(triton, "CHUNK_SLOTS", chunk)
    monkeypatch.setattr(triton, "COLUMNS", 128)
    torch.manual_seed(0)
    case = draw_case(
        (0, 3, 8, 10), 3, 12, 16, 300, markov=with_heads, confidence=with_heads, dtype=dtype, device=DEVICE
    )
    assert (case.weights == 0).any()
    check(case, plain_objective, bound)


def test_correct_is_the_teachers_first_token(draw_case, plain_objective, monkeypatch) -> None:
    monkeypatch.setattr(triton, "COLUMNS", 128)
    torch.manual_seed(1)
    case = draw_case((0, 3), 4, 12, 16, 300, markov=False, dtype=torch.float32, device=DEVICE)
    close = case.last_hidden[case.teacher_index]
    case.hidden = torch.where(torch.arange(8, device=DEVICE)[:, None] % 2 == 0, close, case.hidden.detach())
    _, metrics = plain_objective(case, FACTORS)
    correct = triton.objective_triton(*case.arguments, FACTORS).correct
    assert correct[::2].all()
    assert not correct.all()
    assert torch.equal(correct, metrics["correct"])


def test_no_gradient_leaves_logits_alone(draw_case, monkeypatch) -> None:
    monkeypatch.setattr(triton, "COLUMNS", 128)
    torch.manual_seed(3)
    case = draw_case((0, 3), 3, 12, 16, 300, dtype=torch.float32, device=DEVICE)
    trained = triton.objective_triton(*case.arguments, FACTORS)
    with torch.no_grad():
        terms = triton.objective_triton(*case.arguments, FACTORS)
    assert torch.equal(terms.loss, trained.loss)
    assert not terms.loss.requires_grad


def test_no_counted_slot_gives_zero_loss_and_zero_gradients(draw_case) -> None:
    case = draw_case((0, 4), 3, 9, 8, 50, dtype=torch.float32, device=DEVICE)
    case.weights.zero_()
    terms = triton.objective_triton(*case.arguments, FACTORS)
    assert terms.loss.item() == 0
    for gradient in torch.autograd.grad(terms.loss, case.trained):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes minutes at this vocabulary")
def test_real_vocabulary(draw_case, plain_objective) -> None:
    torch.manual_seed(4)
    case = draw_case(range(0, 200, 7), 7, 210, 256, 151936, rank=64, dtype=torch.bfloat16, device=DEVICE)
    check(case, plain_objective, 1e-2)
