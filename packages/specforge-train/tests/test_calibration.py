import pytest
import torch

from specforge_train.calibration import calibrate, calibration_error, fit_temperature, reliability, scale
from specforge_train.counts import Decoded, Examined


def drawn(temperature: float, count: int = 40_000) -> tuple[torch.Tensor, torch.Tensor]:
    """Confidences, and outcomes whose probability is the confidence at another temperature."""
    random = torch.Generator().manual_seed(0)
    confidence = torch.rand(count, generator=random, dtype=torch.float64)
    happened = torch.rand(count, generator=random, dtype=torch.float64) < scale(confidence, temperature)
    return confidence, happened.double()


def test_the_error_by_hand() -> None:
    confidence = torch.tensor([0.05, 0.95, 0.95, 0.91, 1.0], dtype=torch.float64)
    accepted = torch.tensor([0, 1, 1, 0, 1], dtype=torch.float64)
    low, high = reliability(confidence, accepted)
    assert low == (pytest.approx(0.05), 0.0, 1)
    assert high == (pytest.approx(0.9525), 0.75, 4)
    assert calibration_error(confidence, accepted) == pytest.approx((0.05 + 4 * 0.2025) / 5)


def test_honest_confidence_has_no_error_and_keeps_its_temperature() -> None:
    confidence, accepted = drawn(1.0)
    assert calibration_error(confidence, accepted) < 0.01
    assert fit_temperature(confidence, accepted) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_the_fitted_temperature_is_the_one_that_was_used(temperature: float) -> None:
    confidence, accepted = drawn(temperature)
    assert fit_temperature(confidence, accepted) == pytest.approx(temperature, rel=0.05)
    assert calibration_error(confidence, accepted) > 0.05


def test_prompts_are_halved_and_the_rest_improves() -> None:
    confidence, accepted = (column.tolist() for column in drawn(3.0))
    rows = [Examined(0, c, bool(a)) for c, a in zip(confidence, accepted, strict=True)]
    result = calibrate([rows[i : i + 100] for i in range(0, len(rows), 100)])
    assert result is not None
    assert result.temperature == pytest.approx(3.0, rel=0.1)
    assert result.error_fitted_on_rest < 0.02 < 0.05 < result.error_of_rest
    assert sum(row.count for row in result.bins) == len(rows)
    assert calibrate([rows[:100], []]) is None


def test_the_judged_proposals_of_a_round() -> None:
    """Two accepted and one refused; all accepted; one accepted and then the end."""
    rows = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4], [0.3, 0.2, 0.1]]
    decoded = Decoded([], [3, 4, 1], accepted=[2, 3, 1], drafted=[3, 3, 1], confidence=rows)
    assert decoded.examined() == [
        (0, 0.9, True), (1, 0.8, True), (2, 0.7, False),
        (0, 0.6, True), (1, 0.5, True), (2, 0.4, True),
        (0, 0.3, True),
    ]  # fmt: skip
