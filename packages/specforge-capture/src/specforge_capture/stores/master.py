"""The Mooncake master: a process that knows which client holds which object, started and watched from here.

It keeps no object itself: when it ends, all objects are lost, whoever holds their bytes. It listens where it
is told and nowhere else. (The data sockets of Mooncake's clients, which each choose a free port, do listen on
every interface: Mooncake has no setting for that.)
"""

import math
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from specforge_capture.stores.base import StoreError
from specforge_capture.tied import tied

NOT_INSTALLED = (
    "store.kind mooncake: Mooncake is not installed: pip install 'specforge-capture[mooncake]', on GPU hosts "
    "[mooncake-cuda] or [mooncake-cuda13]"
)
CLIENT_TTL_SECONDS = 10
"""A client that was silent for so long is gone, and its objects with it."""
_POLL_SECONDS = 0.05
_PORTS = range(18000, 32000)
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class MasterSettings:
    """Where a master listens, and how long it waits."""

    host: str = "127.0.0.1"
    """Address that both of its ports are bound to."""
    port: int = 50051
    """Port of the store's clients."""
    metrics_port: int = 50052
    """Port of its health and metrics over HTTP."""
    lease_seconds: float = 60.0
    """How long an object that is being read is kept: `store.lease_seconds`."""
    client_ttl_seconds: int = CLIENT_TTL_SECONDS
    """How long a silent client counts as alive."""

    @property
    def address(self) -> str:
        """`host:port` for `store.master`."""
        return f"{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The command line.

        Raises:
            ValueError: if Mooncake is not installed.
        """
        return [str(_executable()), *self.arguments()]

    def arguments(self) -> list[str]:
        """The command line behind the executable, which this machine may lack."""
        return [
            f"--rpc_address={self.host}",
            f"--rpc_port={self.port}",
            f"--metrics_host={self.host}",
            f"--metrics_port={self.metrics_port}",
            f"--default_kv_lease_ttl={math.ceil(self.lease_seconds * 1000)}",
            f"--client_ttl={self.client_ttl_seconds}",
        ]

    def healthy(self) -> bool:
        """Whether a master answers there that it serves, and takes connections: its port opens later."""
        try:
            url = f"http://{self.host}:{self.metrics_port}/health"
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2) as answer:
                if answer.status != 200:
                    return False
            socket.create_connection((self.host, self.port), timeout=2).close()
        except (urllib.error.URLError, OSError):
            return False
        return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports of `host` that were free when they were looked for.

    They lie below those that Linux gives to outgoing connections, and above Mooncake's own: a server may bind
    its port minutes later, when a port of the former kind has long been taken.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        try:
            _bound(host, port).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise StoreError(
        f"{host} has {len(found)} free ports from {_PORTS[0]} to {_PORTS[-1]}; required: {count}"
    )


@contextmanager
def running_master(
    settings: MasterSettings, log: Path, *, timeout: float = 30.0
) -> Generator[subprocess.Popen[bytes]]:
    """A master for as long as the block lasts; it never outlives the thread that started it.

    Args:
        settings: where it listens.
        log: file that takes its output.
        timeout: seconds until it must serve.

    Raises:
        StoreError: if it ends or does not serve in time, with the end of its log.
        ValueError: if Mooncake is not installed.
    """
    process = start_master(settings, log)
    try:
        wait_until_healthy(settings, process, log, timeout)
        yield process
    finally:
        stop_master(process)


def start_master(settings: MasterSettings, log: Path) -> subprocess.Popen[bytes]:
    """Start a master without waiting for it; see `running_master`.

    Raises:
        StoreError: if one of its ports is taken. It would not notice, and serve nobody.
        ValueError: if Mooncake is not installed.
    """
    for port in (settings.port, settings.metrics_port):
        try:
            _bound(settings.host, port).close()
        except OSError as error:
            raise StoreError(f"port {port} of {settings.host}, for the Mooncake master: {error}") from error
    with open(log, "ab") as output:
        return subprocess.Popen(
            tied(settings.command()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait_until_healthy(
    settings: MasterSettings, process: subprocess.Popen[bytes], log: Path, timeout: float
) -> None:
    """Wait until a started master serves.

    Raises:
        StoreError: if it ends or does not serve in time, with the end of its log.
    """
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        if settings.healthy():
            return
        time.sleep(_POLL_SECONDS)
    ended = process.poll()
    what = f"does not serve after {timeout:.0f} s" if ended is None else f"ended with code {ended}"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
    raise StoreError(f"the Mooncake master on {settings.address} {what}; the end of {log}:\n{tail}")


def stop_master(process: subprocess.Popen[bytes]) -> None:
    """End a master and wait for its exit, so that its ports are free again."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that holds a port."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections do not take a port
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _executable() -> Path:
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(NOT_INSTALLED)
    return Path(spec.submodule_search_locations[0]) / "mooncake_master"
