import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from feature_flow import http_server

from specforge_capture.stores.base import StoreError
from specforge_capture.stores.master import (
    MasterSettings,
    free_ports,
    running_master,
    start_master,
    wait_until_healthy,
)
from specforge_capture.stores.mooncake import load_library


@pytest.fixture
def settings() -> MasterSettings:
    try:
        load_library()
    except ValueError as error:
        raise pytest.skip.Exception(str(error)) from error
    port, metrics = free_ports(2)
    return MasterSettings(port=port, metrics_port=metrics)


def listening(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_a_master_lives_as_long_as_its_block(settings: MasterSettings, tmp_path: Path) -> None:
    with running_master(settings, tmp_path / "log") as process:
        assert settings.healthy()
        assert listening(settings.port)
        assert not listening(settings.port, "127.0.0.2")
        assert not listening(settings.metrics_port, "127.0.0.2")
    assert process.returncode is not None
    assert not listening(settings.port)
    assert not settings.healthy()
    with running_master(settings, tmp_path / "log"):  # on the same ports
        assert settings.healthy()


def test_a_master_whose_port_is_not_open_yet_does_not_serve() -> None:
    port, metrics = free_ports(2)
    with http_server(lambda *_: (200, b"OK"), metrics), socket.socket() as rpc:
        assert not MasterSettings(port=port, metrics_port=metrics).healthy()
        rpc.bind(("127.0.0.1", port))
        rpc.listen()
        assert MasterSettings(port=port, metrics_port=metrics).healthy()


@pytest.mark.parametrize("which", ["port", "metrics_port"])
def test_a_taken_port_is_named(settings: MasterSettings, tmp_path: Path, which: str) -> None:
    port = getattr(settings, which)
    with socket.socket() as taken:
        taken.bind((settings.host, port))
        taken.listen()
        with pytest.raises(StoreError, match=rf"port {port} of 127\.0\.0\.1, .*: .*in use"):
            start_master(settings, tmp_path / "log")


def test_a_master_that_does_not_start_shows_its_log(settings: MasterSettings, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen([*settings.command(), "--no_such_flag"], stderr=output)
    with pytest.raises(StoreError, match=r"ended with code 1; the end of .*log:\nERROR: unknown command"):
        wait_until_healthy(settings, process, log, 20)


def test_a_master_ends_with_the_process_that_started_it(settings: MasterSettings, tmp_path: Path) -> None:
    program = """if True:
        import sys, time
        from pathlib import Path
        from specforge_capture.stores.master import MasterSettings, running_master
        settings = MasterSettings(port=int(sys.argv[1]), metrics_port=int(sys.argv[2]))
        with running_master(settings, Path(sys.argv[3])) as process:
            print(process.pid, flush=True)
            time.sleep(60)
    """
    arguments = [str(settings.port), str(settings.metrics_port), str(tmp_path / "log")]
    parent = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) > 0
    assert settings.healthy()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while listening(settings.port) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not listening(settings.port)
