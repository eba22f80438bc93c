"""Disaggregated runs through the command: they train as colocated ones do, and end in order whatever is
killed."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Ended, Launched, pid_of, require_no_process

from specforge_capture.stores.master import free_ports

Launch = Callable[..., Launched]
STEPS = 12
LENGTH = ["training.epochs=1", "evaluation.interval=0"]
UNMEASURED = ["evaluation.prompts=[]"]
HURT = [*UNMEASURED, "training.save_every=2", "deployment.producer.high_samples=4"]
SECONDS = 90.0
"""A run of which a part was killed must have ended by then, however busy the machine."""


def disaggregated(folder: Path) -> list[str]:
    """What makes a quickstart disaggregated, over a store of files in `folder`."""
    return [
        *LENGTH,
        "deployment.mode=disaggregated",
        "deployment.managed=true",
        "deployment.trainer.nproc_per_node=2",
        "deployment.store.kind=files",
        f"deployment.store.folder={folder}",
    ]


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the store."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def colocated(launch: Launch) -> Ended:
    """One rank that captures itself."""
    ended = launch("colocated", *LENGTH, *UNMEASURED).end()
    assert ended.code == 0, ended
    return ended


@pytest.fixture(scope="module")
def whole(launch: Launch, features: Path) -> Ended:
    """A server, a producer and two ranks, from start to end, measured."""
    ended = launch("whole", *disaggregated(features)).end()
    assert ended.code == 0, ended
    return ended


def require_nothing_left(ended: Ended, features: Path) -> None:
    """Check that no process of a run and no object of it is left."""
    require_no_process(ended.folder, timeout=25)
    assert [path.name for path in features.iterdir() if not path.name.startswith(".")] == []


def require_equal_losses(ended: Ended, expected: Ended, steps: int = STEPS) -> None:
    """Check losses at matched samples."""
    assert [row["step"] for row in ended.rows()] == list(range(1, steps + 1))
    found, wanted = ([row["loss"] for row in run.rows()[:steps]] for run in (ended, expected))
    # float32 sums in another order, over the steps of AdamW.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def test_it_trains_on_the_same_samples_to_the_same_losses(whole: Ended, colocated: Ended) -> None:
    require_equal_losses(whole, colocated)
    for rank in (0, 1):
        halves = [part[2 * rank : 2 * rank + 2] for _, part in colocated.samples()]
        assert [part for _, part in whole.samples(rank)] == halves


def test_it_is_measured_before_and_after_with_a_borrowed_target(whole: Ended) -> None:
    summary = whole.summary
    assert summary["steps"] == STEPS
    assert summary["lossless_identical"] == summary["lossless_total"] == 2
    assert summary["tau_untrained"] >= 1.0
    assert (whole.folder / "export" / "config.json").is_file()


def test_logs_are_streamed_under_the_names_of_their_parts(whole: Ended) -> None:
    assert "server-0: ready at 127.0.0.1:" in whole.out
    assert any(line.startswith("producer | ") for line in whole.out.splitlines())


def test_nothing_is_left_of_a_run_that_is_done(whole: Ended, features: Path) -> None:
    require_nothing_left(whole, features)


def hurt(launch: Launch, features: Path, part: str, step: int) -> Ended:
    """Start or resume a run, kill -9 a part of it during traffic, and wait for the end of the command."""
    run = launch("hurt", *disaggregated(features), *HURT)
    run.forget()
    run.wait_for_step(step)
    victim = run.process.pid if part == "launcher" else pid_of(run.folder, part)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    ended = run.end(timeout=SECONDS)
    assert time.monotonic() - began < SECONDS
    require_nothing_left(ended, features)
    return ended


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_was_killed_goes_on_in_parts_started_by_their_roles(
    launch: Launch, features: Path, colocated: Ended
) -> None:
    """A run loses its server, then its launcher; its parts, each started on its own, end it with the losses
    of a run that nothing happened to."""
    ended = hurt(launch, features, "server-0", 2)
    assert ended.code == 1, ended
    assert ended.err.startswith("server-0 was killed by SIGKILL"), ended
    hurt(launch, features, "launcher", 6)
    (port,) = free_ports(1)
    parts = ["deployment.managed=false", f"deployment.servers.addresses=[127.0.0.1:{port}]"]
    server, producer, consumer = (
        launch("hurt", *disaggregated(features), *HURT, *parts, "--role", role)
        for role in ("server", "producer", "consumer")
    )
    done, produced = consumer.end(), producer.end()
    assert done.code == 0, done
    assert produced.code == 0, produced
    server.process.send_signal(signal.SIGINT)
    assert server.end(timeout=SECONDS).code == 130
    require_nothing_left(done, features)
    require_equal_losses(done, colocated)
    for rank in (0, 1):
        assert [step for step, _ in done.samples(rank)] == list(range(1, STEPS + 1))
