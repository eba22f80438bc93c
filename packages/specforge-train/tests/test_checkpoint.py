import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks
from tiny_training import SPEC, Layered, sharded_layered

from specforge_config.deployment import TrainerNodes
from specforge_config.optim import OptimizerConfig
from specforge_config.topology import Topology
from specforge_train.checkpoint import Checkpoints, newest_checkpoint, read_meta
from specforge_train.optim import build_adamw, optimizer_state, squared_norm, update
from specforge_train.parallel import World, full, full_state, start_world

PLAN = {"seed": 1, "islands": [[0], [1]], "data": "abc"}


def trained(world: World, seed: int, steps: int = 1) -> tuple[Layered, torch.optim.AdamW]:
    """A sharded model and its optimizer after some steps."""
    model = sharded_layered(world, seed)
    optimizer = build_adamw(model, OptimizerConfig())
    for step in range(steps):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).backward()
        squared = world.sum_(squared_norm(model) / world.replicas)
        update(optimizer, 1e-2, 1.0, torch.tensor(4.0, dtype=torch.float64), squared)
    return model, optimizer


def checkpoints(folder: Path, world: World, plan: dict[str, Any] = PLAN, **settings: Any) -> Checkpoints:
    return Checkpoints(folder, world, plan, SPEC, **settings)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_saved_state_comes_back_bit_for_bit(tmp_path: Path, world: World) -> None:
    model, optimizer = trained(world, seed=0, steps=2)
    fresh = checkpoints(tmp_path, world)
    assert (fresh.step, fresh.path, fresh.newest) == (0, None, None)
    path = fresh.save(7, model, optimizer, {"samples": 28.0})
    assert (fresh.newest, fresh.newest_step) == (path, 7)
    assert (tmp_path / "checkpoints" / "latest").read_text() == path.name == "step-000007"
    again = checkpoints(tmp_path, world)
    assert (again.step, again.path, again.totals) == (7, path, {"samples": 28.0})
    other, other_optimizer = trained(world, seed=1)
    again.load(other, other_optimizer)
    for name, value in full_state(model).items():
        assert torch.equal(full_state(other)[name], value)
    expected, found = optimizer_state(model, optimizer), optimizer_state(other, other_optimizer)
    for name, state in expected.items():
        for key, value in state.items():
            assert torch.equal(found[name][key], value), (name, key)


def test_the_newest_are_kept_and_leftovers_removed(tmp_path: Path, world: World) -> None:
    model, optimizer = trained(world, seed=0)
    run = checkpoints(tmp_path, world, keep=2)
    for step in (1, 2, 10):
        run.save(step, model, optimizer, {})
    (tmp_path / "checkpoints" / ".partial-step-000011").mkdir()
    assert checkpoints(tmp_path, world).step == 10
    assert names(tmp_path) == ["latest", "step-000002", "step-000010"]


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no meta", "cut meta"])
def test_a_damaged_checkpoint_is_passed_over_and_written_again(
    tmp_path: Path, world: World, damage: str
) -> None:
    model, optimizer = trained(world, seed=0)
    run = checkpoints(tmp_path, world)
    run.save(1, model, optimizer, {})
    path = run.save(2, model, optimizer, {})
    data, meta = next(path.glob("*.distcp")), path / "meta.json"
    content = data.read_bytes()
    if damage == "cut":
        data.write_bytes(content[:-1])
    elif damage == "flip":
        data.write_bytes(content[:500] + bytes([content[500] ^ 1]) + content[501:])
    elif damage == "missing":
        data.unlink()
    elif damage == "no meta":
        meta.unlink()
    else:
        meta.write_text(meta.read_text()[:-20])
    with pytest.warns(UserWarning, match="step-000002 is not whole and is passed over"):
        again = checkpoints(tmp_path, world)
    assert again.step == 1
    assert again.save(2, model, optimizer, {}) == path
    assert checkpoints(tmp_path, world).step == 2


def test_another_plan_or_contract_is_an_error_naming_each_value(tmp_path: Path, world: World) -> None:
    checkpoints(tmp_path, world).save(1, *trained(world, seed=0), {})
    with pytest.raises(ValueError, match=r"another plan") as error:
        checkpoints(tmp_path, world, {**PLAN, "seed": 2, "rows": 5})
    assert "seed: 2 (this run) != 1" in str(error.value)
    assert "rows: 5 (this run) != None" in str(error.value)
    assert "data" not in str(error.value).split("restore")[0].split("\n", 1)[1]
    spec = SPEC.model_copy(update={"layer_ids": (0, 1)})
    with pytest.raises(
        ValueError, match=r"layer_ids: \(0, 2\) \(the checkpoint .*\) != \(0, 1\) \(this run\)"
    ):
        Checkpoints(tmp_path, world, PLAN, spec)


def test_resume_policies(tmp_path: Path, world: World) -> None:
    with pytest.raises(ValueError, match=r"training\.resume is required, but .* holds no whole checkpoint"):
        checkpoints(tmp_path, world, resume="required")
    run = checkpoints(tmp_path, world, resume="never")
    run.save(1, *trained(world, seed=0), {})
    with pytest.raises(ValueError, match=r"training\.resume is never, but .*step-000001 exists"):
        checkpoints(tmp_path, world, resume="never")
    assert checkpoints(tmp_path, world, resume="required").step == 1


def check_disk_full_and_reshard(folder: str) -> None:
    tp_size = 2
    topology = Topology(int(os.environ["WORLD_SIZE"]), tp_size)
    world = start_world(TrainerNodes(device="cpu", cpu_threads=1), topology, "full")
    model, optimizer = trained(world, seed=0, steps=2)
    run = checkpoints(Path(folder), world)
    run.save(1, model, optimizer, {})
    # No file may grow beyond 2 KB any more: what a full disk does to one rank's writes.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    with pytest.raises(
        ValueError, match=r"step 2 could not be written .*File too large.*earlier checkpoints are"
    ):
        run.save(2, model, optimizer, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    world.gather(None)
    assert names(Path(folder)) == ["latest", "step-000001"]
    world.gather(None)  # both have looked before one writes again
    run.save(2, model, optimizer, {})
    world.close()


def test_a_full_disk_is_a_clear_error_and_other_ranks_can_read_the_rest(tmp_path: Path, world: World) -> None:
    run_ranks(check_disk_full_and_reshard, 2, tmp_path / "logs", str(tmp_path / "run"))
    saved = newest_checkpoint(tmp_path / "run")
    assert saved is not None
    assert read_meta(saved)["step"] == 2
    run = checkpoints(tmp_path / "run", world)
    model, optimizer = trained(world, seed=1)
    run.load(model, optimizer)
    expected, _ = trained(world, seed=0, steps=2)
    # Two ranks summed the same gradient twice, the clipped update is the same.
    for name, value in full_state(expected).items():
        torch.testing.assert_close(full_state(model)[name], value, rtol=1e-5, atol=1e-6)
    shutil.rmtree(saved)
    assert newest_checkpoint(tmp_path / "run") is not None


def check_shards_of_what_one_rank_saved(folder: str) -> None:
    world = start_world(TrainerNodes(device="cpu", cpu_threads=1), Topology(2), "full")
    model, optimizer = trained(world, seed=1)
    checkpoints(Path(folder), world).load(model, optimizer)
    saved = torch.load(Path(folder) / "expected.pt")
    for name, value in full_state(model).items():
        assert torch.equal(value, saved["weights"][name]), name
    for name, state in optimizer_state(model, optimizer).items():
        assert torch.equal(full(state["exp_avg"]), saved["moments"][name]), name
    world.close()


def test_what_one_rank_saved_whole_is_sharded_by_others(tmp_path: Path, world: World) -> None:
    model, optimizer = trained(world, seed=0, steps=2)
    checkpoints(tmp_path / "run", world).save(2, model, optimizer, {})
    moments = {name: state["exp_avg"] for name, state in optimizer_state(model, optimizer).items()}
    torch.save({"weights": full_state(model), "moments": moments}, tmp_path / "run" / "expected.pt")
    run_ranks(check_shards_of_what_one_rank_saved, 2, tmp_path / "logs", str(tmp_path / "run"))
