from dataclasses import replace
from typing import Any

import pytest
import torch
from dspark_definition import definition
from tiny_drafts import frozen_target, make_batch, make_shape
from torch import Tensor

from specforge_config.features import FeatureBatch
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import StepTerms
from specforge_train.methods.dspark import DSpark
from specforge_train.methods.dspark.features import DSparkInputs
from specforge_train.methods.dspark.model import DSparkModel

METHOD, CPU = DSpark(), torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov": {"head": "gated", "rank": 6}},
    "rnn": {"markov": {"head": "rnn", "rank": 6}},
    "plain confidence": {"confidence": {"with_markov": False}},
    "no confidence": {"confidence": {"enabled": False}, "markov": {"head": "gated", "rank": 6}},
    "window": {"sliding_window": 5, "loss": {"ce": 0.3, "l1": 0.5, "confidence": 0.7, "decay": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}
MASKS = [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1], [0, 1, 0], [0, 0, 0, 0, 1, 1]]


def built(**draft: Any) -> DSparkModel:
    """A float64 draft whose norms and biases are random too."""
    model = METHOD.build(make_shape(**draft))
    model.init_weights(3)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            parameter.data += torch.randn(parameter.shape, generator=generator) / 4
    return model.double()


def run(model: DSparkModel, batch: FeatureBatch) -> tuple[DSparkInputs, StepTerms, dict[str, Tensor]]:
    """Inputs, terms and gradients."""
    inputs = METHOD.prepare(batch, model.shape, 0).to(CPU)
    model.zero_grad()
    terms = model(inputs, batch.hidden, batch.last_hidden, frozen_target())
    terms.loss.backward()
    return inputs, terms, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def document(batch: FeatureBatch, index: int) -> FeatureBatch:
    """One document of a packed batch."""
    start, stop = batch.cu_seqlens[index : index + 2].tolist()
    names = ("tokens", "loss_mask", "hidden", "last_hidden")
    return replace(
        batch,
        **{name: getattr(batch, name)[start:stop] for name in names},
        cu_seqlens=torch.tensor([0, stop - start]),
        sample_ids=batch.sample_ids[index : index + 1],
        positions=batch.positions[index : index + 1],
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_value_and_gradients_follow_the_definition(variant: str) -> None:
    model, batch = built(**VARIANTS[variant]), make_batch(MASKS)
    inputs, terms, gradients = run(model, batch)
    loss, weights, tau = definition(dict(model.named_parameters()), model.shape, batch, frozen_target())
    expected = torch.autograd.grad(loss, list(model.parameters()))
    # The model's rotary tables are float32; everything else is float64.
    assert terms.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, gradient), wanted in zip(gradients.items(), expected, strict=True):
        assert wanted.norm() > 0, name
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, name
    assert inputs.weight_sum == pytest.approx(weights)
    numerator, blocks = terms.sums["tau_estimate"]
    assert blocks.item() == len(inputs.anchors)
    assert numerator.item() == pytest.approx(tau, rel=1e-5)


@pytest.mark.parametrize("variant", ["vanilla", "rnn", "window"])
def test_packed_documents_equal_separate_ones(variant: str) -> None:
    model, batch = built(**VARIANTS[variant]), make_batch(MASKS)
    _, packed, gradients = run(model, batch)
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in packed.sums}
    added = {name: torch.zeros_like(x) for name, x in gradients.items()}
    for index in range(len(MASKS)):
        _, terms, alone = run(model, document(batch, index))
        for name, pair in terms.sums.items():
            sums[name] += torch.stack([x.double() for x in pair])
        for name, gradient in alone.items():
            added[name] += gradient
    for name, pair in packed.sums.items():
        # Denominators are float32.
        torch.testing.assert_close(torch.stack([x.double() for x in pair]), sums[name], rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, added[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 6])
def test_a_block_sees_no_state_at_or_behind_its_anchor(window: int | None) -> None:
    model = built(sliding_window=window)
    batch = make_batch([[0] * 10 + [1] * 4 + [0] * 6, [0] * 4])
    inputs = METHOD.prepare(batch, model.shape, 0).to(CPU)
    assert inputs.anchors.tolist() == [10, 11, 12]

    def states(rows: slice) -> Tensor:
        hidden = batch.hidden.clone()
        hidden[rows] += 1.0
        return model.states(inputs, hidden, frozen_target().embedding).view(3, 4, -1)

    base = states(slice(0, 0))
    assert torch.equal(states(slice(12, None)), base)
    behind = states(slice(10, None))
    assert torch.equal(behind[0], base[0])
    assert not torch.equal(behind[1, 0], base[1, 0])
    assert not torch.equal(behind[2, 0], base[2, 0])
    before = states(slice(9, 10))
    assert all(not torch.equal(before[block, 0], base[block, 0]) for block in range(3))


def test_a_window_slides_with_the_slots_and_makes_the_block_causal() -> None:
    model = built(sliding_window=6, num_layers=1)
    batch, embedding = make_batch([[0] * 10 + [1] * 2 + [0] * 6]), frozen_target().embedding
    inputs = METHOD.prepare(batch, model.shape, 0).to(CPU)
    base = model.states(inputs, batch.hidden, embedding)
    for row, seen in ((4, 0), (5, 1), (7, 3), (8, 4), (9, 4)):
        hidden = batch.hidden.clone()
        hidden[row] += 1.0
        changed = (model.states(inputs, hidden, embedding) != base).any(dim=1)
        # Slot k stands at 10 + k and sees 6 tokens, itself included.
        assert changed.tolist() == [k < seen for k in range(4)]
    ids = inputs.ids.clone()
    ids[2] = 5
    changed = (model.states(replace(inputs, ids=ids), batch.hidden, embedding) != base).any(dim=1)
    assert changed.tolist() == [False, False, True, True]


def test_blocks_do_not_see_each_other() -> None:
    model, embedding = built(), frozen_target().embedding
    batch = make_batch([[0] * 5 + [1] * 8])
    every = METHOD.prepare(batch, model.shape, 0).to(CPU)
    alone = replace(batch, loss_mask=torch.tensor([t in (7, 8) for t in range(13)]))
    one = METHOD.prepare(alone, model.shape, 0).to(CPU)
    assert one.anchors.tolist() == [7]
    together = model.states(every, batch.hidden, embedding).view(-1, 4, 16)
    index = every.anchors.tolist().index(7)
    single = model.states(one, batch.hidden, embedding)
    torch.testing.assert_close(single, together[index], rtol=1e-12, atol=1e-12)


def test_a_perfect_draft_scores_the_full_length() -> None:
    """The target's next token depends on the current one alone, and the Markov head says the same."""
    model = built(markov={"rank": 16})
    table = torch.randn(40, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    batch = make_batch([[0] * 3 + [1] * 12])
    batch = replace(batch, last_hidden=table[batch.tokens])
    with torch.no_grad():
        model.norm.weight.zero_()
        model.markov_head.markov_w1.weight.copy_(table)
        model.markov_head.markov_w2.weight.copy_(frozen_target().head)
    inputs, terms, _ = run(model, batch)
    whole = inputs.counts[3].item()
    numerator, blocks = terms.sums["tau_estimate"]
    # The last three blocks reach over the document's end: 3, 2 and 1 of their slots count.
    assert blocks.item() == whole + 3
    assert numerator.item() == pytest.approx(5 * whole + 4 + 3 + 2)
    assert terms.sums["loss/l1"][0].item() == pytest.approx(0, abs=1e-9)
    for name in ("accuracy", "accept/0", "accept/1", "accept/2", "accept/3"):
        numerator, denominator = terms.sums[name]
        assert numerator.item() == pytest.approx(denominator.item())


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_supervised_gives_zero_loss_and_zero_gradients(variant: str) -> None:
    model = built(**VARIANTS[variant])
    inputs, terms, gradients = run(model, make_batch([[0] * 6, [0, 1, 0]]))
    assert terms.loss.item() == 0.0
    assert inputs.dropped == 2
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in gradients.values())
    assert not any(x.any() for pair in terms.sums.values() for x in pair)


def test_a_dropped_sample_changes_nothing() -> None:
    model, batch = built(), make_batch([[1] * 6, [0] * 5])
    with_it, without = run(model, batch)[1], run(model, document(batch, 0))[1]
    assert with_it.loss.item() == pytest.approx(without.loss.item(), rel=1e-12)


def test_weights_do_not_depend_on_device_or_neighbours() -> None:
    vanilla, gated = make_shape(), make_shape(markov={"head": "gated"})
    first, second, other = METHOD.build(vanilla), METHOD.build(gated), METHOD.build(vanilla)
    with torch.device("meta"):
        empty = METHOD.build(vanilla)
    empty.to_empty(device="cpu")
    for model, seed in ((first, 5), (second, 5), (empty, 5), (other, 6)):
        model.init_weights(seed)
    state = first.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in empty.state_dict().items())
    assert torch.equal(second.fc.weight, first.fc.weight)
    assert not torch.equal(other.fc.weight, first.fc.weight)
    assert not torch.equal(*(state[f"layers.{i}.mlp.up_proj.weight"] for i in (0, 1)))
    assert first.fc.weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert torch.equal(first.norm.weight, torch.ones(16))
    assert not state["confidence_head.proj.bias"].any()


def test_a_state_loaded_on_the_meta_device_is_whole() -> None:
    model, batch = built(**VARIANTS["yarn"]), make_batch(MASKS)
    with torch.device("meta"):
        loaded = METHOD.build(model.shape).double()
    loaded.to_empty(device="cpu")
    for x in (*loaded.parameters(), *loaded.buffers()):
        x.data.fill_(float("nan"))
    loaded.load_state_dict(model.state_dict())
    terms = run(loaded, batch)[1]
    assert torch.isfinite(terms.loss)
    assert terms.loss.item() == run(model, batch)[1].loss.item()


def test_states_of_another_type_are_cast() -> None:
    model = METHOD.build(make_shape()).bfloat16()
    model.init_weights(0)
    batch, frozen = make_batch([[1] * 8]), frozen_target()
    half = FrozenTarget(frozen.embedding.bfloat16(), frozen.head.bfloat16())
    inputs = METHOD.prepare(batch, model.shape, 0).to(CPU)
    assert batch.last_hidden is not None
    terms = model(inputs, batch.hidden.float(), batch.last_hidden.half(), half)
    assert torch.isfinite(terms.loss)
    assert terms.loss.dtype == torch.float32


def test_inputs_must_be_placed_and_uncast() -> None:
    model, batch, frozen = built(), make_batch([[1] * 5]), frozen_target()
    inputs = METHOD.prepare(batch, model.shape, 0)
    placed = inputs.to(CPU)
    for wrong in (inputs, replace(placed, counts=placed.counts.bfloat16())):
        with pytest.raises(ValueError, match="cast_forward_inputs=False"):
            model(wrong, batch.hidden, batch.last_hidden, frozen)
    with pytest.raises(ValueError, match="final_state"):
        model(placed, batch.hidden, None, frozen)
