"""Processes beside the ranks, with Mooncake's real master as the one that starts soonest."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specforge_capture.stores.master import free_ports
from specforge_config.loading import dump_run
from specforge_config.run import RunConfig
from specforge_launch.beside import Beside, ServiceFailed
from specforge_launch.plan import make_plan
from specforge_launch.run_folder import RunFolder

pytest.importorskip("mooncake")

Load = Callable[..., RunConfig]
SECONDS = 60.0


@pytest.fixture
def told() -> list[str]:
    """What was shown."""
    return []


@pytest.fixture
def beside(load: Load, told: list[str], tmp_path: Path) -> Iterator[Callable[..., Beside]]:
    """Makes the processes of some roles of a managed run whose folder is locked by a plain file."""
    made = []
    with open(tmp_path / "lock", "w") as lock:

        def make(*roles: str, overrides: tuple[str, ...] = ()) -> Beside:
            managed = ("deployment.mode=disaggregated", "deployment.managed=true")
            config = load(*managed, *overrides)
            plan, folder = make_plan(config), RunFolder(config.folder)
            assert plan.capture is not None
            services = [service for service in plan.capture.services if service.role in roles]
            folder.clear(service.name for service in services)
            launched = folder.launch("node0")
            launched.write_text(dump_run(config))
            made.append(Beside(config, plan, services, folder, launched, lock.fileno(), told.append))
            return made[-1]

        yield make
        for each in made:
            each.stop()


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    """A program that only waits."""
    path = tmp_path / "sleeper"
    path.write_text("#!/bin/sh\necho loading\nexec sleep 300\n")
    path.chmod(0o755)
    return path


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_is_ready_once_it_answers_and_gone_after_the_stop(
    beside: Callable[..., Beside], told: list[str]
) -> None:
    (port,) = free_ports(1)
    running = beside("store", overrides=(f"deployment.store.master=127.0.0.1:{port}",))
    running.start(lambda: False)
    assert f"store: ready at 127.0.0.1:{port}" in told
    assert listens(port)
    assert running.failure() is None
    running.stop()
    assert running.ended
    assert not listens(port)


def test_a_start_removes_what_killed_launchers_left_of_temporary_files(
    beside: Callable[..., Beside], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "specforge-left"
    left.mkdir()
    (left / ".holder").touch()
    (port,) = free_ports(1)
    running = beside("store", overrides=(f"deployment.store.master=127.0.0.1:{port}",))
    running.start(lambda: False)
    assert not left.exists()
    assert len(list(tmp_path.glob("specforge-*"))) == 1
    running.stop()
    assert list(tmp_path.glob("specforge-*")) == []


def test_a_killed_process_is_named(beside: Callable[..., Beside]) -> None:
    (port,) = free_ports(1)
    running = beside("store", overrides=(f"deployment.store.master=127.0.0.1:{port}",))
    running.start(lambda: False)
    os.kill(running.pids()["store"], signal.SIGKILL)
    wait_until(running.failure)
    failure = running.failure()
    assert failure is not None
    assert failure.headline.startswith("store was killed by SIGKILL")


def test_a_port_in_use_is_refused_before_anything_starts(beside: Callable[..., Beside]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = beside("store", overrides=(f"deployment.store.master=127.0.0.1:{port}",))
        with pytest.raises(ValueError, match=rf"deployment\.store\.master is 127\.0\.0\.1:{port}, where"):
            running.start(lambda: False)
    assert running.ended


def test_nothing_more_is_started_after_a_stop_request(beside: Callable[..., Beside]) -> None:
    running = beside("store", "server")
    running.start(lambda: True)
    assert running.pids() == {}


def test_a_server_that_cannot_start_is_told_in_its_own_words(beside: Callable[..., Beside]) -> None:
    """The target of these tests has no tokenizer, which would name a mask token."""
    running = beside("server", overrides=("deployment.store.kind=files", "deployment.store.folder=none"))
    with pytest.raises(ServiceFailed) as caught:
        running.start(lambda: False)
    assert caught.value.failure.user_error
    assert caught.value.failure.headline.startswith("server-0: draft.mask_token_id is unset")


def test_a_producer_may_take_its_seconds_to_end_and_then_is_ended(
    beside: Callable[..., Beside], sleeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr("specforge_launch.beside.FREE_SECONDS", 1.0)
    running = beside("producer", overrides=("deployment.producer.drain_seconds=2",))
    running.start(lambda: False)
    began = time.monotonic()
    running.finish(lambda: False)
    assert time.monotonic() - began >= 3
    assert not running.ended
    running.stop()
    assert running.ended


def test_a_server_that_never_answers_is_given_up(beside: Callable[..., Beside], sleeper: Path) -> None:
    running = beside(
        "server",
        overrides=(
            f"deployment.servers.python={sleeper}",
            "deployment.servers.startup_seconds=0.5",
            "deployment.store.kind=files",
            "deployment.store.folder=none",
        ),
    )
    with pytest.raises(ServiceFailed, match=r"server-0 did not answer within 0\.5 s .*startup_seconds"):
        running.start(lambda: False)
    running.stop()
    assert running.ended
