import numpy as np
import pytest
import torch

from specforge_capture.targets.sampling import Sampling, choose, uniform_draws

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0]).log()
ALMOST_ONE = 1 - 2.0**-24


def chosen(draws: list[float], temperature: float = 1.0, top_p: float = 1.0) -> list[int]:
    logits = LOGITS.expand(len(draws), -1)
    return choose(logits, Sampling(temperature, top_p), torch.tensor(draws)).tolist()


def test_temperature_0_takes_the_likeliest() -> None:
    assert choose(torch.tensor([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), Sampling()).tolist() == [1, 0]


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    assert chosen([0.0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, ALMOST_ONE]) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_nucleus_is_the_fewest_tokens_that_hold_top_p() -> None:
    # 0.4 + 0.3 reach 0.65; renormalised, the first holds 4/7.
    assert chosen([0.0, 0.57, 0.58, ALMOST_ONE], top_p=0.65) == [0, 0, 1, 1]
    assert chosen([0.0, ALMOST_ONE], top_p=0.1) == [0, 0]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.9)])
def test_samples_have_the_distribution(temperature: float, top_p: float) -> None:
    draws = torch.from_numpy(uniform_draws(0, (1,), 40_000))
    logits = torch.tensor([[1.0, -0.5, 0.3, 2.0, -3.0]])
    found = choose(logits.expand(len(draws), -1), Sampling(temperature, top_p), draws)
    wanted = (logits[0] / temperature).softmax(-1)
    ordered, order = wanted.sort(descending=True)
    kept = ordered.cumsum(0) - ordered < top_p
    wanted = torch.zeros(5).scatter(0, order, ordered * kept)
    shares = torch.bincount(found, minlength=5) / len(draws)
    # Four standard deviations of a share near one half.
    assert (shares - wanted / wanted.sum()).abs().max() < 4 * 0.5 / 200
    assert not shares[wanted == 0].any()


def test_draws_are_a_sequences_own() -> None:
    first = uniform_draws(7, (3, 0), 20)
    assert np.array_equal(first[:5], uniform_draws(7, (3, 0), 5))
    others = [uniform_draws(7, (3, 1), 20), uniform_draws(7, (4, 0), 20), uniform_draws(8, (3, 0), 20)]
    assert not any(np.array_equal(first, other) for other in others)
    assert (first >= 0).all()
    assert (first < 1).all()
    # The stream is fixed: the same seed gives the same answers under later versions, too.
    assert (uniform_draws(0, (0, 0), 2) * 2**24).tolist() == [236005, 4324616]
