import shutil
from pathlib import Path

import pytest
import torch
from tiny_training import MASK, TARGET, sharded_layered, tiny_config, tiny_trainer

from specforge_train.export.sglang import export_sglang
from specforge_train.parallel import World, full_state
from specforge_train.registry import get_method
from specforge_train.weights import read_weights, warm_start


def test_a_run_starts_from_a_checkpoint_a_run_or_an_export(tmp_path: Path, world: World) -> None:
    source = tiny_trainer(tiny_config(tmp_path / "source", optimizer={"lr": 0.5}), 1, world=world)
    summary = source.train()
    state = full_state(source.model)
    exported = export_sglang(state, source.shape, tmp_path / "export", torch.float32)
    assert summary.checkpoint is not None
    for number, path in enumerate((summary.checkpoint, tmp_path / "source", exported)):
        found = read_weights(path)
        assert found.keys() == state.keys()
        config = tiny_config(tmp_path / f"run-{number}", draft={"init_from": str(path)})
        started = tiny_trainer(config, 1, world=world)
        assert started.step == 0
        for name, value in full_state(started.model).items():
            assert torch.equal(value, state[name]), name
            assert torch.equal(found[name], state[name]), name


def test_weights_of_another_draft_are_refused_by_name(tmp_path: Path, world: World) -> None:
    config = tiny_config(tmp_path, draft={"num_layers": 1})
    method = get_method("dspark")
    shape = method.resolve(config.draft, TARGET, MASK)
    small = method.build(shape)
    folder = export_sglang(small.state_dict(), shape, tmp_path / "export", torch.float32)
    wider = method.build(method.resolve(config.draft.model_copy(update={"num_layers": 2}), TARGET, MASK))
    with pytest.raises(ValueError, match=r"draft\.init_from: .* missing \['layers\.1\."):
        warm_start(wider, folder)
    with pytest.raises(ValueError, match=r"left over \['confidence_head"):
        warm_start(sharded_layered(world, seed=0), folder)
    slim = config.draft.model_copy(update={"intermediate_size": 8})
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \(32, 16\), required \(8, 16\)"):
        warm_start(method.build(method.resolve(slim, TARGET, MASK)), folder)


def test_what_holds_no_weights_is_refused(tmp_path: Path, world: World) -> None:
    with pytest.raises(ValueError, match="neither a checkpoint, nor the folder of a run"):
        read_weights(tmp_path)
    trainer = tiny_trainer(tiny_config(tmp_path / "run"), 1, world=world)
    path = trainer.train().checkpoint
    assert path is not None
    shutil.copytree(path, tmp_path / "copy")
    next((tmp_path / "copy").glob("*.distcp")).write_bytes(b"")
    with pytest.raises(ValueError, match="is not whole"):
        read_weights(tmp_path / "copy")
