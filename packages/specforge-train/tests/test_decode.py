"""Losslessness with a real (random, tiny) transformers target, and what is counted."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_drafts import frozen_target, make_shape
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from specforge_train.counts import DecodeCounts
from specforge_train.decode import evaluate, plain_decode, speculative_decode
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.dspark import DSpark
from specforge_train.verification import GREEDY, Proposal, Verification

GAMMA, LAYER_IDS = 4, (0, 1)
PROMPTS = [torch.tensor([5, 9, 3]), torch.tensor([1]), torch.tensor([7, 7, 2, 30, 11, 4, 8])]


@dataclass
class Extension:
    logits: Tensor
    hidden: Tensor


class HFTarget:
    """A transformers model; float64, so that no rounding tells one pass from several."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.5, tie_word_embeddings=False,
        )  # fmt: skip
        self.model = Qwen3ForCausalLM(config).double().eval()

    def start(self) -> DynamicCache:
        return DynamicCache()

    def extend(self, ids: Tensor, cache: DynamicCache) -> Extension:
        out = self.model(ids[None], past_key_values=cache, output_hidden_states=True)
        return Extension(out.logits[0], torch.cat([out.hidden_states[k + 1][0] for k in LAYER_IDS], dim=-1))

    def crop(self, cache: DynamicCache, length: int) -> None:
        cache.crop(length)


class Oracle:
    """Proposes the target's own continuation, with the slots in `wrong` spoilt; records what it is told."""

    block_size = GAMMA

    def __init__(self, prompt: Tensor, continuation: list[int], wrong: tuple[int, ...] = ()) -> None:
        self.sequence = prompt.tolist() + continuation + [0] * GAMMA
        self.wrong = wrong
        self.told: list[Tensor] = []

    def begin(self) -> None:
        self.told = []

    def propose(
        self, new_hidden: Tensor, position: int, anchor: int, rule: Verification = GREEDY
    ) -> Proposal:
        self.told.append(new_hidden)
        assert sum(len(x) for x in self.told) == position
        assert anchor == self.sequence[position]
        tokens = self.sequence[position + 1 : position + 1 + GAMMA]
        tokens = [(token + 1) % 40 if k in self.wrong else token for k, token in enumerate(tokens)]
        logits = torch.nn.functional.one_hot(torch.tensor(tokens), 40).double()
        return Proposal(torch.tensor(tokens), torch.ones(GAMMA), logits)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget()


@pytest.fixture(scope="module")
def greedy(target: HFTarget) -> list[list[int]]:
    """The target's own 40 tokens after each prompt."""
    return [plain_decode(target, prompt, 40, []) for prompt in PROMPTS]


def test_greedy_is_the_targets_own(target: HFTarget, greedy: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, greedy, strict=True):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        own = target.model.generate(prompt[None], max_new_tokens=12, **options)
        assert tokens[:12] == own[0, len(prompt) :].tolist()
        assert plain_decode(target, prompt, 12, [tokens[4]]) == tokens[: tokens.index(tokens[4]) + 1]


def test_a_perfect_draft_emits_whole_blocks(target: HFTarget, greedy: list[list[int]]) -> None:
    oracle = Oracle(PROMPTS[0], greedy[0])
    decoded = speculative_decode(target, oracle, PROMPTS[0], 1 + 3 * (GAMMA + 1), [])
    assert decoded.tokens == greedy[0][:16]
    assert decoded.emitted == [GAMMA + 1] * 3
    assert decoded.accepted == decoded.drafted == [GAMMA] * 3
    counts = evaluate(target, oracle, PROMPTS[:1], 16, [])
    assert counts.tau == GAMMA + 1
    assert counts.accept_by_slot == [1.0] * GAMMA


def test_the_draft_is_told_the_states_of_accepted_tokens_once(
    target: HFTarget, greedy: list[list[int]]
) -> None:
    oracle = Oracle(PROMPTS[2], greedy[2], wrong=(2,))
    speculative_decode(target, oracle, PROMPTS[2], 20, [])
    told = torch.cat(oracle.told)
    with torch.no_grad():
        whole = target.extend(torch.tensor(PROMPTS[2].tolist() + greedy[2]), target.start()).hidden
    torch.testing.assert_close(told, whole[: len(told)])


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_proposals_are_accepted_up_to_the_first_wrong_one(
    wrong: int, target: HFTarget, greedy: list[list[int]]
) -> None:
    oracle, tokens = Oracle(PROMPTS[1], greedy[1], wrong=(wrong,)), 1 + 4 * (wrong + 1)
    decoded = speculative_decode(target, oracle, PROMPTS[1], tokens, [])
    assert decoded.tokens == greedy[1][:tokens]
    assert decoded.emitted == [wrong + 1] * 4
    assert decoded.accepted == [wrong] * 4
    assert decoded.drafted[:3] == [GAMMA] * 3


def test_a_stop_token_inside_a_block_ends_the_output(target: HFTarget, greedy: list[list[int]]) -> None:
    for prompt, tokens in zip(PROMPTS, greedy, strict=True):
        for stop in set(tokens[:9]):
            decoded = speculative_decode(target, Oracle(prompt, tokens), prompt, 40, [stop])
            assert decoded.tokens == tokens[: tokens.index(stop) + 1]
            assert 1 + sum(decoded.emitted) == len(decoded.tokens)
            assert decoded.accepted == decoded.drafted


@pytest.mark.parametrize("limit", range(1, 9))
def test_the_limit_cuts_a_block(limit: int, target: HFTarget, greedy: list[list[int]]) -> None:
    decoded = speculative_decode(target, Oracle(PROMPTS[0], greedy[0]), PROMPTS[0], limit, [])
    assert decoded.tokens == greedy[0][:limit]
    assert decoded.accepted == decoded.drafted


def test_a_lossy_target_is_found_out(target: HFTarget, greedy: list[list[int]]) -> None:
    """What `identical` counts is compared, not assumed: this target forgets the wrong rows."""

    class Forgetful(HFTarget):
        def crop(self, cache: DynamicCache, length: int) -> None:
            super().crop(cache, length - 1)

    counts = evaluate(Forgetful(), Oracle(PROMPTS[0], greedy[0], wrong=(0,)), PROMPTS[:1], 3, [])
    assert (counts.identical, counts.total) == (0, 1)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_an_untrained_draft_is_lossless_and_useless(head: str, target: HFTarget) -> None:
    method = DSpark()
    shape = make_shape(markov={"head": head, "rank": 6}, target_layer_ids=LAYER_IDS)
    model = method.build(shape)
    model.init_weights(0)
    weights = (target.model.model.embed_tokens.weight, target.model.lm_head.weight)
    drafter = method.drafter(model.double(), FrozenTarget(*(x.detach() for x in weights)))
    seen = []
    counts = evaluate(
        target, drafter, PROMPTS, 24, [13], on_prompt=lambda so_far, _: seen.append(so_far.total)
    )
    assert seen == [1, 2, 3]
    assert counts.identical == counts.total == 3
    assert 1.0 <= counts.tau < 1.6
    assert counts.tokens == sum(len(plain_decode(target, prompt, 24, [13])) for prompt in PROMPTS)
    assert counts.emitted == counts.tokens - 3
    assert counts.seconds_plain > 0
    assert counts.seconds_speculative > 0


class MarkovTarget:
    """A target whose next token depends on the current one alone."""

    def __init__(self, table: Tensor, frozen: FrozenTarget) -> None:
        self.next, self.width = (table @ frozen.head.T), 2 * frozen.head.shape[1]

    def start(self) -> list[int]:
        return []

    def extend(self, ids: Tensor, cache: list[int]) -> Extension:
        cache += ids.tolist()
        return Extension(self.next[ids], torch.zeros(len(ids), self.width, dtype=torch.float64))

    def crop(self, cache: list[int], length: int) -> None:
        del cache[length:]


def test_a_draft_that_knows_the_target_is_always_accepted() -> None:
    frozen = frozen_target()
    method = DSpark()
    model = method.build(make_shape(markov={"rank": 16}))
    model.init_weights(0)
    model.double()
    table = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        model.norm.weight.zero_()
        model.markov_head.markov_w1.weight.copy_(table)
        model.markov_head.markov_w2.weight.copy_(frozen.head)
    target, drafter = MarkovTarget(table, frozen), method.drafter(model, frozen)
    counts = evaluate(target, drafter, PROMPTS, 1 + 4 * (GAMMA + 1), [])
    assert counts.tau == GAMMA + 1
    assert counts.identical == 3


def test_the_targets_own_outputs_are_decoded_once(target: HFTarget, greedy: list[list[int]]) -> None:
    passes, own_outputs = [], {}

    class Counting:
        start, crop = staticmethod(target.start), staticmethod(target.crop)

        @staticmethod
        def extend(ids: Tensor, cache: Any) -> Any:
            passes.append(len(ids))
            return target.extend(ids, cache)

    def measure() -> DecodeCounts:
        passes.clear()
        oracle = Oracle(PROMPTS[0], greedy[0], wrong=())
        return evaluate(Counting(), oracle, PROMPTS[:1], 16, [], own_outputs=own_outputs)

    first, cost = measure(), len(passes)
    second = measure()
    assert (second.identical, second.tau, second.seconds_plain) == (1, first.tau, first.seconds_plain)
    assert len(passes) == cost - 16
    assert own_outputs[tuple(PROMPTS[0].tolist())].tokens == greedy[0][:16]


def test_a_long_prompt_is_read_in_passes() -> None:
    frozen = frozen_target()
    passes = []

    class Counting(MarkovTarget):
        def extend(self, ids: Tensor, cache: list[int]) -> Extension:
            passes.append(len(ids))
            return super().extend(ids, cache)

    table = torch.randn(40, 16, dtype=torch.float64)
    target, prompt = Counting(table, frozen), torch.arange(1100) % 39
    assert plain_decode(target, prompt, 1, []) == [int(target.next[prompt[-1]].argmax())]
    assert passes == [512, 512, 76]


def test_an_empty_prompt_is_refused(target: HFTarget) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        plain_decode(target, torch.tensor([], dtype=torch.long), 4, [])


def test_counts_add_and_travel_as_vectors() -> None:
    first = DecodeCounts(
        [3, 1], [4, 4], rounds=4, emitted=8, identical=1, total=1, tokens=9, seconds_plain=2.5, tokens_plain=9
    )
    second = DecodeCounts(
        [1, 1],
        [2, 1],
        rounds=2,
        emitted=4,
        identical=0,
        total=1,
        tokens=5,
        seconds_speculative=0.5,
        tokens_plain=6,
    )
    summed = DecodeCounts.from_vector(first.to_vector() + second.to_vector())
    assert summed == first + second
    assert summed == DecodeCounts([4, 2], [6, 5], 6, 12, 1, 2, 14, 0.5, 2.5, 15)
    assert summed.tau == 2.0
    assert summed.speedup == pytest.approx((14 / 0.5) / (15 / 2.5))
    assert summed.accept_by_slot == [4 / 6, 2 / 5]
    assert DecodeCounts.zeros(2) + first == first
    assert all(x != x for x in (DecodeCounts.zeros(1).tau, *DecodeCounts.zeros(1).accept_by_slot))
