"""Drafts exported for speculators, in speculators 0.9's own DSpark model: every weight, and the logits of a
training step."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drafts import (
    HEADS,
    METHOD,
    ROOT,
    export_random,
    frozen_target,
    load_model,
    resolved_run,
    run_program,
)
from torch import Tensor

from specforge_config.features import FeatureBatch
from specforge_train.methods.dspark.model import DSparkModel

SITE = ROOT / ".cache" / "speculators"
LENGTHS = (40, 21)
VERIFIERS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Read from the target, not from the draft."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def batch() -> FeatureBatch:
    """Two documents, supervised throughout, with random states."""
    resolved, rows = resolved_run(()), sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 3 * resolved.target.hidden_size, generator=generator)
    return FeatureBatch(
        tokens=torch.randint(3, resolved.target.vocab_size, (rows,), generator=generator),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0),
        hidden=hidden[:, resolved.target.hidden_size :],
        last_hidden=hidden[:, : resolved.target.hidden_size],
        sample_ids=("a", "b"),
        positions=((0, 0), (0, 1)),
        spec=resolved.spec,
    )


@pytest.fixture(scope="module")
def folders(batch: FeatureBatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each draft's folder, after speculators has run; without speculators its tests are skipped."""
    if not (SITE / "built-from").is_file():
        raise pytest.skip.Exception("needs speculators: .venv/bin/python scripts/install_speculators.py")
    assert batch.last_hidden is not None
    place, rows = tmp_path_factory.mktemp("drafts"), sum(LENGTHS)
    given = {
        "hidden_states": batch.hidden[None],
        "input_ids": batch.tokens[None],
        "loss_mask": batch.loss_mask[None],
        "verifier_last_hidden_states": batch.last_hidden[None],
        "document_ids": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "max_anchors": rows - 7,  # all that it takes: none in the last block
    }
    folders = {}
    for number, (name, overrides) in enumerate(HEADS.items()):
        folders[name] = place / str(number)
        export_random(("draft.num_anchors=64", *overrides), folders[name] / "draft", "speculators")
        torch.save(given, folders[name] / "given.pt")
    run_program(Path(sys.executable), "speculators_draft_program.py", SITE, *folders.values())
    return folders


def drafted(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "drafted.pt")


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_holds_what_was_exported(folders: dict[str, Path], name: str) -> None:
    expected, frozen = load_model(folders[name] / "draft").state_dict(), frozen_target()
    found = drafted(folders[name])
    assert found["class"] == "DSparkDraftModel"
    target = {key: found["parameters"].pop(key) for key in VERIFIERS}
    assert found["parameters"].keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found["parameters"][key], value), key
    assert torch.equal(target["embed_tokens.weight"], frozen.embedding)
    assert torch.equal(target["lm_head.weight"], frozen.head)


@pytest.mark.parametrize("name", HEADS)
def test_a_step_computes_the_logits_that_ours_does(
    folders: dict[str, Path], batch: FeatureBatch, name: str
) -> None:
    """Both compute in float32 with the weights as written in bfloat16, so that they differ by the order of
    sums alone: far less than bfloat16 rounds (4e-3)."""
    model, theirs = load_model(folders[name] / "draft"), drafted(folders[name])
    logits, confidence, anchors = training_logits(model, batch)
    block = model.shape.config.block_size
    taken = list(range(sum(LENGTHS) - block))
    rows = [taken.index(anchor) for anchor in anchors if anchor in taken]
    mine = [index for index, anchor in enumerate(anchors) if anchor in taken]
    assert len(rows) == len(taken) - 1, "all but the last token of the first document"
    for found, ours in ((theirs["logits"], logits), (theirs["confidence"], confidence)):
        blocks = found.view(len(taken), block, -1)[rows]
        torch.testing.assert_close(blocks, ours.view(len(anchors), block, -1)[mine], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def training_logits(model: DSparkModel, batch: FeatureBatch) -> tuple[Tensor, Tensor, list[int]]:
    """Logits [N·G, V] and confidence logits [N·G] of a step's blocks, and their anchors."""
    frozen = frozen_target()
    inputs = METHOD.prepare(batch, model.shape, 0).to(torch.device("cpu"))
    states = model.states(inputs, batch.hidden, frozen.embedding)
    embedding = model.markov_head.markov_w1(inputs.previous).view(-1, inputs.block, model.markov_head.rank)
    blocks = states.view(-1, inputs.block, states.shape[-1])
    features = model.markov_head(embedding, blocks).flatten(0, 1)
    logits = states @ frozen.head.T + model.markov_head.markov_w2(features)
    assert model.confidence_head is not None
    return logits, model.confidence_head(blocks, embedding), inputs.anchors.tolist()
