import pytest
import torch
from torch import Tensor

from specforge_train.verification import Greedy, Proposal, Sampling, Verification, rule_for

VOCABULARY, GAMMA = 5, 3


def logits_of(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choose(rule: Verification, logits: Tensor) -> Tensor:
    return rule.choice(logits, rule.draws(1, logits.device)[0])


def sampled(rule: Sampling, draft: Tensor) -> Proposal:
    tokens = torch.stack([choose(rule, row) for row in draft])
    return Proposal(tokens, torch.ones(GAMMA), draft)


def test_greedy_accepts_up_to_the_first_difference() -> None:
    target = logits_of(GAMMA + 1, 0)
    own = target.argmax(-1).tolist()
    for wrong in range(GAMMA + 1):
        tokens = torch.tensor([(t + 1) % VOCABULARY if k == wrong else t for k, t in enumerate(own[:GAMMA])])
        accepted, emitted = Greedy().verify(Proposal(tokens, torch.ones(GAMMA), target[:GAMMA]), target)
        assert (accepted, emitted) == (wrong, own[: wrong + 1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_emitted_tokens_are_distributed_as_the_targets(temperature: float) -> None:
    """The first two places, over many rounds: their joint distribution is p_0 p_1, whatever the draft is."""
    target, draft = logits_of(GAMMA + 1, 1), logits_of(GAMMA, 2)
    rule, rounds = Sampling(temperature, 0), 5_000
    pairs = torch.zeros(VOCABULARY, VOCABULARY)
    accepted_first = 0
    for _ in range(rounds):
        accepted, emitted = rule.verify(sampled(rule, draft), target)
        accepted_first += accepted > 0
        first, second = (*emitted, None)[:2]
        if second is None:  # the next round would draw it from the target alone or with a draft
            second = int(choose(rule, target[1]))
        pairs[first, second] += 1
    p, q = ((x / temperature).softmax(-1) for x in (target, draft))
    wanted = p[0][:, None] * p[1][None] * rounds
    # Pearson's statistic with 24 degrees of freedom stays below 52 in all but one of a thousand cases.
    assert float(((pairs - wanted) ** 2 / wanted).sum()) < 52
    expected = float(torch.minimum(p[0], q[0]).sum())
    assert accepted_first / rounds == pytest.approx(expected, abs=4 * (0.25 / rounds) ** 0.5)


def test_equal_distributions_accept_everything() -> None:
    target = logits_of(GAMMA + 1, 3)
    rule = Sampling(1.0, 5)
    assert all(rule.verify(sampled(rule, target[:GAMMA]), target)[0] == GAMMA for _ in range(200))


def test_a_certain_target_is_followed() -> None:
    target = torch.full((GAMMA + 1, VOCABULARY), -1e9, dtype=torch.float64)
    target[:, 2] = 0
    rule = Sampling(1.0, 5)
    for _ in range(50):
        accepted, emitted = rule.verify(sampled(rule, torch.zeros(GAMMA, VOCABULARY)), target)
        assert emitted == [2] * (accepted + 1)


def test_a_prompts_stream_depends_on_seed_and_prompt_alone() -> None:
    logits = torch.zeros(1000)

    def draw(seed: int, prompt: list[int]) -> int:
        return int(choose(rule_for(1.0, seed, torch.tensor(prompt)), logits))

    assert draw(0, [1, 2]) == draw(0, [1, 2])
    assert len({draw(0, [1, 2]), draw(1, [1, 2]), draw(0, [2, 1])}) == 3
    assert isinstance(rule_for(0, 1, torch.tensor([1])), Greedy)
    with pytest.raises(ValueError, match="temperature is -1"):
        rule_for(-1, 0, torch.tensor([1]))
