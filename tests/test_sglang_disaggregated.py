"""Disaggregated runs over stock SGLang with the plugin and Mooncake: the losses are those of a colocated run
with transformers, also after Mooncake's master was killed."""

import os
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import Ended, Launched, pid_of, require_no_process

from specforge_capture.sglang.leftovers import mapped_by_group
from specforge_capture.stores.master import free_ports

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".cache" / "sglang-cpu"
INSTALL = ROOT / "scripts" / "sglang_cpu" / "install.py"
LENGTH = ["training.epochs=1", "training.save_every=2", "evaluation.prompts=[]", "evaluation.interval=0"]
STEPS = 12
SECONDS = 90.0
Launch = Callable[..., Launched]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def colocated(launch: Launch) -> Ended:
    """One rank that captures itself, with transformers."""
    ended = launch("colocated", *LENGTH).end()
    assert ended.code == 0, ended
    return ended


@pytest.fixture(scope="module")
def served() -> list[str]:
    """What makes a quickstart disaggregated, over SGLang of another environment; without it, or without
    Mooncake, its tests are skipped."""
    if not (ENVIRONMENT / "built-from").is_file():
        raise pytest.skip.Exception(f"needs SGLang on a CPU: python3.11 {INSTALL.relative_to(ROOT)}")
    if find_spec("mooncake") is None:
        raise pytest.skip.Exception("needs Mooncake: specforge-capture[mooncake]")
    (port,) = free_ports(1)
    return [
        *LENGTH,
        "target.backend=sglang",
        "deployment.mode=disaggregated",
        "deployment.managed=true",
        "deployment.trainer.nproc_per_node=2",
        f"deployment.servers.python={ENVIRONMENT / 'bin' / 'python'}",
        f"deployment.store.master=127.0.0.1:{port}",
        "deployment.store.capacity_bytes=268435456",
        "deployment.producer.high_samples=4",
    ]


def require_equal_losses(ended: Ended, expected: Ended) -> None:
    """Check losses at matched samples."""
    assert [row["step"] for row in ended.rows()] == list(range(1, STEPS + 1))
    found, wanted = (torch.tensor([row["loss"] for row in run.rows()]) for run in (ended, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_sglang_mooncake_and_two_ranks_train_as_one_rank_does(
    launch: Launch, served: list[str], colocated: Ended
) -> None:
    run = launch("served", *served)
    run.wait_for(lambda event: event["stage"] == "train", timeout=600)
    shared = mapped_by_group(pid_of(run.folder, "server-0"))
    assert shared, "SGLang's processes share memory"
    ended = run.end(timeout=600)
    assert ended.code == 0, ended
    require_no_process(ended.folder)
    assert not [path for path in shared if path.exists()], "SGLang leaves it behind"
    require_equal_losses(ended, colocated)


def test_a_killed_store_ends_the_run_and_the_same_command_goes_on(
    launch: Launch, served: list[str], colocated: Ended
) -> None:
    """Mooncake's master is killed during traffic, and with it all objects; the next start captures them anew.
    Kills of other parts are in test_disaggregated.py and specforge-capture's test_killed_parts.py."""
    run = launch("hurt", *served)
    run.wait_for(lambda event: event["stage"] == "train" and event["step"] >= 2, timeout=600)
    began = time.monotonic()
    os.kill(pid_of(run.folder, "store"), signal.SIGKILL)
    ended = run.end(timeout=SECONDS)
    assert time.monotonic() - began < SECONDS
    assert ended.code == 1, ended
    assert ended.err.startswith("store was killed by SIGKILL"), ended
    require_no_process(ended.folder, timeout=25)
    done = launch("hurt", *served).end(timeout=600)
    assert done.code == 0, done
    require_equal_losses(done, colocated)
