import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specforge_kernels.dspark_objective import reference
from specforge_kernels.dspark_objective.api import DSparkLossWeights, dspark_objective

FACTORS = DSparkLossWeights(ce=0.3, l1=0.8, confidence=0.6)
ANCHORS = (0, 3, 4, 11, 12, 13, 27, 30)


class LargestTensor(TorchDispatchMode):
    """Watches every operation: the most elements of one result, and the most bytes of results alive at
    once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.live = self.live_peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (
            x for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, torch.Tensor)
        ):
            storage = tensor.untyped_storage()
            self.elements = max(self.elements, storage.nbytes() // 4)
            if not any(
                storage._cdata == a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)
            ):
                self.live += storage.nbytes()
                self.live_peak = max(self.live_peak, self.live)
                weakref.finalize(storage, self._release, storage.nbytes())
        return out

    def _release(self, size: int) -> None:
        self.live -= size


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def check(case, plain_objective, tolerance) -> None:
    loss, metrics = plain_objective(case, FACTORS)
    wanted = torch.autograd.grad(loss, case.trained)
    terms = dspark_objective(*case.arguments, FACTORS)
    found = torch.autograd.grad(terms.loss, case.trained)
    for name in ("ce", "l1", "confidence"):
        value = getattr(terms, name)
        assert not value.requires_grad
        assert abs(value.item() - metrics[name].item()) <= tolerance * abs(metrics[name].item()), name
    assert relative(terms.loss.detach(), loss.detach()) < tolerance
    assert relative(terms.acceptance, metrics["acceptance"]) < tolerance
    for gradient, reference_gradient in zip(found, wanted, strict=True):
        assert relative(gradient, reference_gradient) < tolerance


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("chunk_elements", [2**25, 5 * 97])
def test_values_and_gradients_in_float64(
    markov, confidence, chunk_elements, monkeypatch, draw_case, plain_objective
) -> None:
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    case = draw_case(ANCHORS, 7, 33, 13, 97, markov=markov, confidence=confidence)
    check(case, plain_objective, 1e-12)
    _, metrics = plain_objective(case, FACTORS)
    assert torch.equal(dspark_objective(*case.arguments, FACTORS).correct, metrics["correct"])


# bf16: logits and their gradients carry 8 bits; errors of single elements average out in norms.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_stays_near_float64(dtype, tolerance, draw_case, plain_objective) -> None:
    torch.manual_seed(1)
    check(draw_case(ANCHORS, 5, 40, 32, 1000, dtype=dtype), plain_objective, tolerance)


def test_real_vocabulary(draw_case, plain_objective) -> None:
    torch.manual_seed(2)
    check(draw_case((1, 2), 3, 6, 8, 151936, dtype=torch.float32), plain_objective, 1e-4)


def test_slots_of_weight_zero_are_not_read(draw_case) -> None:
    torch.manual_seed(3)
    case = draw_case(ANCHORS, 7, 33, 13, 97)
    before = dspark_objective(*case.arguments, FACTORS)
    without = (case.weights == 0).nonzero().flatten()
    assert without.numel() > 0
    case.labels[without], case.teacher_index[without] = -100, 10**6
    with torch.no_grad():
        case.hidden[without] = float("nan")
    after = dspark_objective(*case.arguments, FACTORS)
    assert torch.equal(before.loss, after.loss)
    gradient = torch.autograd.grad(after.loss, case.hidden)[0]
    assert torch.equal(gradient[without], torch.zeros_like(gradient[without]))
    assert gradient.isfinite().all()
    assert not after.acceptance[without].any()
    assert not after.correct[without].any()


def test_no_counted_slot_gives_zero_loss_and_zero_gradients(draw_case) -> None:
    case = draw_case((0, 4), 3, 9, 8, 50)
    case.weights.zero_()
    terms = dspark_objective(*case.arguments, FACTORS)
    assert terms.loss.item() == 0
    terms.loss.backward()
    assert torch.equal(case.hidden.grad, torch.zeros_like(case.hidden))


def test_a_perfect_draft_scores_every_slot(draw_case) -> None:
    # Slot k is taught by the target's state at p + k: a draft with those states accepts the whole block.
    case = draw_case((2, 5), 4, 12, 16, 80, markov=False)
    case.hidden = case.last_hidden[case.teacher_index].requires_grad_()
    terms = dspark_objective(*case.arguments, FACTORS)
    torch.testing.assert_close(terms.acceptance, torch.ones_like(terms.acceptance))
    assert terms.correct.all()
    shifted = case.teacher_index + 1
    case.hidden = case.last_hidden[shifted]
    assert dspark_objective(*case.arguments, FACTORS).acceptance.max() < 0.9


def test_each_teacher_row_is_projected_once(draw_case, monkeypatch) -> None:
    case = draw_case((2, 3, 4), 4, 12, 16, 80)
    rows = []
    chunks = reference.slot_chunks
    monkeypatch.setattr(
        reference, "slot_chunks", lambda *a: (rows.append(c.teacher_rows.tolist()) or c for c in chunks(*a))
    )
    dspark_objective(*case.arguments, FACTORS)
    assert rows == [[2, 3, 4, 5, 6, 7]]


def test_no_fp32_logits_of_all_slots_live(draw_case) -> None:
    # 40 anchors at a real vocabulary are 170 MB of fp32 logits; chunks hold half of that, and so at any
    # number of anchors.
    torch.manual_seed(4)
    case = draw_case(tuple(range(0, 80, 2)), 7, 90, 4, 151936, rank=2, dtype=torch.float32)
    largest = LargestTensor()
    with largest:
        dspark_objective(*case.arguments, FACTORS).loss.backward()
    assert reference.CHUNK_ELEMENTS // 2 < largest.elements <= reference.CHUNK_ELEMENTS
    assert largest.elements < case.hidden.shape[0] * 151936
    assert largest.live_peak < 2.5 * 2**30


def test_bad_input_is_refused(draw_case) -> None:
    case = draw_case((2, 5), 4, 12, 16, 80)
    case.labels[1] = 80
    with pytest.raises(ValueError, match=r"labels of weighted slots must be in \[0, 80\)"):
        dspark_objective(*case.arguments, FACTORS)
    case.labels[1] = 0
    case.weights[0] = -1
    with pytest.raises(ValueError, match="must not be negative, found -1"):
        dspark_objective(*case.arguments, FACTORS)
    case.weights[0] = 1
    case.w2 = None
    with pytest.raises(ValueError, match="markov and w2 come together"):
        dspark_objective(*case.arguments, FACTORS)
    case.markov, case.labels = None, case.labels[:-1]
    with pytest.raises(ValueError, match="labels must hold one value a slot, 8, found \\(7,\\)"):
        dspark_objective(*case.arguments, FACTORS)
