import copy
from itertools import pairwise

import pytest
import torch
from tiny_drafts import frozen_target, make_batch, make_shape

from specforge_train.frozen import FrozenTarget
from specforge_train.methods.dspark import DSpark
from specforge_train.verification import Proposal, rule_for

METHOD = DSpark()


@pytest.mark.parametrize(
    "draft",
    [
        {},
        {"markov": {"head": "gated", "rank": 6}},
        {"markov": {"head": "rnn", "rank": 6}, "confidence": {"with_markov": False}},
        {"sliding_window": 5},
    ],
    ids=["vanilla", "gated", "rnn", "window"],
)
def test_incremental_proposals_equal_the_training_forward(draft) -> None:
    """At each anchor, after whatever steps led there, what training computes when taught the proposals."""
    frozen = frozen_target()
    model = METHOD.build(make_shape(**draft))
    model.init_weights(0)
    model.double()
    sequence = make_batch([[0] * 30])
    drafter = METHOD.drafter(model, frozen)
    done = 0
    for anchor in (1, 2, 7, 12, 13, 20):
        token = int(sequence.tokens[anchor])
        tokens, confidence, drafted = drafter.propose(sequence.hidden[done:anchor], anchor, token)
        done = anchor
        taught = make_batch([[t in (anchor, anchor + 1) for t in range(30)]])
        taught.tokens[anchor + 1 : anchor + 5] = tokens
        inputs = METHOD.prepare(taught, model.shape, 0).to(torch.device("cpu"))
        assert inputs.anchors.tolist() == [anchor]
        states = model.states(inputs, sequence.hidden, frozen.embedding)
        embedding = model.markov_head.markov_w1(inputs.previous)[None]
        features = model.markov_head(embedding, states[None])[0]
        logits = states @ frozen.head.T + model.markov_head.markov_w2(features)
        assert torch.equal(logits.argmax(1), tokens)
        torch.testing.assert_close(drafted, logits)
        assert model.confidence_head is not None
        expected = model.confidence_head(states, embedding[0]).sigmoid()
        torch.testing.assert_close(confidence, expected.float())
    assert drafter.context_length == 20


def test_the_context_outgrows_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = frozen_target()
    model = METHOD.build(make_shape())
    model.init_weights(0)
    hidden = make_batch([[0] * 60]).hidden

    def proposals() -> list[Proposal]:
        drafter, places = METHOD.drafter(model.double(), frozen), (1, 5, 11, 12, 40, 60)
        return [drafter.propose(hidden[a:b], b, 3) for a, b in pairwise((0, *places))]

    expected = proposals()
    monkeypatch.setattr("specforge_train.methods.dspark.drafter._LEAST_CAPACITY", 8)
    for found, wanted in zip(proposals(), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_gpu_proposes_by_recorded_steps_what_a_cpu_does(temperature: float) -> None:
    frozen = frozen_target()
    model = METHOD.build(make_shape())
    model.init_weights(0)
    hidden = make_batch([[0] * 60]).hidden
    weights = FrozenTarget(frozen.embedding.float(), frozen.head.float())
    on_cpu = METHOD.drafter(copy.deepcopy(model), weights)
    on_gpu = METHOD.drafter(model.cuda(), FrozenTarget(weights.embedding.cuda(), weights.head.cuda()))
    rules = [rule_for(temperature, 0, torch.tensor([1])) for _ in range(2)]
    done = 0
    for anchor in (20, 21, 26, 27, 40, 41):
        part = hidden[done:anchor].float()
        want = on_cpu.propose(part, anchor, 3, rules[0])
        have = on_gpu.propose(part.cuda(), anchor, 3, rules[1])
        for a, b in zip(have, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3)
        done = anchor


def test_begin_forgets_the_context() -> None:
    frozen = frozen_target()
    model = METHOD.build(make_shape())
    model.init_weights(0)
    drafter, batch = METHOD.drafter(model.double(), frozen), make_batch([[1] * 9])
    first = drafter.propose(batch.hidden[:5], 5, 3)
    drafter.propose(batch.hidden[5:7], 7, 4)
    drafter.begin()
    again = drafter.propose(batch.hidden[:5], 5, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_states_that_do_not_reach_the_anchor_are_refused() -> None:
    frozen = frozen_target()
    model = METHOD.build(make_shape())
    drafter, batch = METHOD.drafter(model.double(), frozen), make_batch([[1] * 9])
    with pytest.raises(ValueError, match="the anchor is at 6, but the context has 0 tokens and 5 new states"):
        drafter.propose(batch.hidden[:5], 6, 3)


def test_without_the_confidence_head_every_slot_is_certain() -> None:
    frozen = frozen_target()
    model = METHOD.build(make_shape(confidence={"enabled": False}))
    model.init_weights(0)
    proposal = METHOD.drafter(model.double(), frozen).propose(make_batch([[1] * 5]).hidden, 5, 3)
    assert proposal.confidence.tolist() == [1.0] * 4
