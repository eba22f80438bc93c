"""Runs the processes beside the ranks: starts them in their order, each once the one before it answers, shows
what they print, tells how one failed, and ends them in the reverse order.

Invariant: each is a process group that ends with the launcher (`lifeline`), and none outlives `stop`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from specforge_capture.http_client import RequestFailed, ServerDown
from specforge_capture.sglang.leftovers import mapped_by_group, remove_unmapped
from specforge_capture.stores.master import free_ports
from specforge_capture.wire import CaptureClient
from specforge_config.base import host_and_port
from specforge_config.deployment import Disaggregated
from specforge_config.run import RunConfig
from specforge_config.store import FileStore, MooncakeStore
from specforge_launch import lifeline
from specforge_launch.failure import Failure, how_ended
from specforge_launch.plan import RunPlan
from specforge_launch.run_folder import Follower, RunFolder, shown
from specforge_launch.scratch import Scratch, sweep
from specforge_launch.services import Service, master_of, server_address

Message = Callable[[str], None]
STORE_SECONDS = 60.0
"""How long the store's master may take to start."""
_STOP_SECONDS = {"producer": 30.0, "server": 10.0, "store": 10.0}
"""How long a process may take to end on SIGTERM; then it is killed."""
FREE_SECONDS = 60.0
"""How long the producer may take to free what it holds, after its `drain_seconds`."""
_REPEAT_SECONDS = 0.5
_TICK_SECONDS = 0.1
_PROBE_SECONDS = 5.0
_TAIL_LINES = 20


class ServiceFailed(Exception):
    """A process beside the ranks did not start, or ended before it was asked to."""

    def __init__(self, failure: Failure) -> None:
        """Keep what to tell."""
        super().__init__(failure.headline)
        self.failure = failure


@dataclass
class _Running:
    service: Service
    process: subprocess.Popen[bytes]
    log: Follower
    address: str
    """`host:port` at which this machine reaches it."""
    scratch: Scratch
    """Its folder for temporary files."""
    shared_memory: set[Path] = field(default_factory=set)
    """What it has been seen to map."""

    def note_shared_memory(self) -> None:
        self.shared_memory |= mapped_by_group(self.process.pid)

    def clear(self) -> None:
        """Remove what it left, once it has ended."""
        remove_unmapped(self.shared_memory)
        self.scratch.remove()


class Beside:
    """The processes beside the ranks that this launcher starts.

    Args:
        config: the run.
        plan: its plan.
        services: what to start, in order.
        folder: the run's folder.
        launched: the configuration that they are started with.
        lock: descriptor of the folder's lock, which they hold too.
        tell: shows a line.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: RunPlan,
        services: Sequence[Service],
        folder: RunFolder,
        launched: Path,
        lock: int,
        tell: Message,
    ) -> None:
        self._config, self._plan, self._services = config, plan, services
        self._folder, self._launched, self._lock, self._tell = folder, launched, lock, tell
        self._running: list[_Running] = []

    @property
    def _deployment(self) -> Disaggregated:
        return self._config.disaggregated  # only those have processes beside ranks

    def start(self, stopped: Callable[[], bool]) -> None:
        """Start all, each once the one before it answers; returns early once `stopped` says so. What killed
        launchers left of temporary files is removed before.

        Raises:
            ServiceFailed: if one ends, or does not answer in time.
            ValueError: if the port of the store's master is in use.
        """
        sweep()
        for service in self._services:
            if stopped():
                return
            running, answers = self._launch(service)
            self._running.append(running)
            self._await(running, answers, stopped)
            running.note_shared_memory()
            if running.address and not stopped():
                self._tell(f"{service.name}: ready at {running.address}")

    def show(self) -> None:
        """Show what was printed since the last call."""
        for running in self._running:
            for line in running.log.lines():
                if line:
                    self._tell(f"{running.service.name} | {line}")

    def failure(self) -> Failure | None:
        """How one that ended too early did, the first in their order; None while all is well."""
        for running in self._running:
            code = running.process.poll()
            if code is not None and not (running.service.role == "producer" and code == 0):
                return self._failure_of(running, code)
        return None

    def pids(self) -> dict[str, int]:
        """Name -> process id of what was started."""
        return {running.service.name: running.process.pid for running in self._running}

    @property
    def ended(self) -> bool:
        """Whether all have ended."""
        return all(running.process.poll() is not None for running in self._running)

    def finish(self, stopped: Callable[[], bool]) -> None:
        """Wait until the producer has freed what it holds and ended by itself, as it does after the ranks."""
        self._wait_for_producer(stopped)

    def drain(self, stopped: Callable[[], bool]) -> None:
        """Ask the producer, where it runs without the ranks, to end its stream in order, and wait for it."""
        for running in self._producers():
            running.process.send_signal(signal.SIGTERM)
            self._wait_for_producer(stopped)

    def stop(self) -> None:
        """End all that still run, the last started first, and free what they leave: shared memory, and what a
        killed producer left in a store that outlives it."""
        unclean = False
        for running in reversed(self._running):
            running.note_shared_memory()
            # Servers may finish requests after a producer that did not end by itself and well.
            unclean |= running.service.role == "producer" and running.process.poll() != 0
            self._end(running)
            _kill_group(running.process)
            running.clear()
        self.show()
        if unclean and self._deployment.managed and _outlives_with_objects(self._deployment.store):
            self._sweep()

    def _producers(self) -> list[_Running]:
        """The producer, while it runs."""
        return [r for r in self._running if r.service.role == "producer" and r.process.poll() is None]

    def _wait_for_producer(self, stopped: Callable[[], bool]) -> None:
        if not self._producers():
            return
        deadline = time.monotonic() + self._deployment.producer.drain_seconds + FREE_SECONDS
        while self._producers() and not stopped() and time.monotonic() < deadline:
            self.show()
            time.sleep(_TICK_SECONDS)

    def _launch(self, service: Service) -> tuple[_Running, Callable[[], bool]]:
        """Start one process. Returns it with what tells whether it answers."""
        arguments, address, answers = self._facts(service)
        role = [sys.executable, "-m", "specforge_launch.roles", service.role, str(self._launched)]
        variables = {"OMP_NUM_THREADS": str(self._plan.threads_per_rank)}
        if service.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(_visible, service.gpus))
        scratch = Scratch()
        path = self._folder.log(service.name)
        with open(path, "wb") as log:
            lines = Follower(path)
            variables["TMPDIR"] = str(scratch.path)
            process = lifeline.start([*role, *arguments], log, variables, self._lock, scratch.lock)
        return _Running(service, process, lines, address, scratch), answers

    def _facts(self, service: Service) -> tuple[list[str], str, Callable[[], bool]]:
        """Arguments of a role, the address at which it is reached, and what tells whether it answers."""
        if service.role == "store":
            store = self._deployment.store
            assert isinstance(store, MooncakeStore)
            _require_free(store.master)
            master = master_of(store, free_ports(1, host_and_port(store.master)[0])[0])
            return [str(master.metrics_port)], store.master, master.healthy
        if service.role == "server":
            host, port = server_address(self._deployment, service.index)
            port = port or free_ports(1, host)[0]
            address = f"{_reachable(host)}:{port}"
            arguments = [str(service.index), str(port), self._plan.device]
            return arguments, address, lambda: _captures(address)
        servers = [running.address for running in self._running if running.service.role == "server"]
        return list(servers or self._deployment.servers.addresses), "", lambda: True

    def _await(self, running: _Running, answers: Callable[[], bool], stopped: Callable[[], bool]) -> None:
        service = running.service
        seconds = STORE_SECONDS if service.role == "store" else self._deployment.servers.startup_seconds
        deadline = time.monotonic() + seconds
        while True:
            self.show()
            if failure := self.failure():
                raise ServiceFailed(failure)
            if stopped() or answers():
                return
            if time.monotonic() > deadline:
                headline = f"{service.name} did not answer within {seconds:g} s"
                if service.role == "server":
                    headline += " (deployment.servers.startup_seconds)"
                raise ServiceFailed(Failure(headline, self._tail(service)))
            time.sleep(_TICK_SECONDS)

    def _failure_of(self, running: _Running, code: int) -> Failure:
        name = running.service.name
        path = self._folder.error(name)
        if path.is_file():
            record = json.loads(path.read_text())
            if record["type"] in ("ValueError", "ConfigError"):
                return Failure(f"{name}: {record['message']}", user_error=True)
            return Failure(f"{name} failed: {record['type']}: {record['message']}", record["traceback"])
        return Failure(how_ended(name, code), self._tail(running.service))

    def _tail(self, service: Service) -> str:
        lines = self._folder.log(service.name).read_bytes().decode(errors="replace").rstrip("\n").split("\n")
        return "\n".join(map(shown, lines[-_TAIL_LINES:]))

    def _end(self, running: _Running) -> None:
        """SIGTERM, to the producer twice: what it waits for will not come."""
        process, role = running.process, running.service.role
        waits = (_REPEAT_SECONDS, _STOP_SECONDS[role]) if role == "producer" else (_STOP_SECONDS[role],)
        for seconds in waits:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_TICK_SECONDS)

    def _sweep(self) -> None:
        command = [sys.executable, "-m", "specforge_launch.roles", "sweep", str(self._launched)]
        with open(self._folder.log("sweep"), "wb") as log:
            process = lifeline.start(command, log, {}, self._lock)
        try:
            process.wait(FREE_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_group(process)
        if process.returncode:
            self._tell(f"objects of the run may be left in the store: see {self._folder.log('sweep')}")


def _outlives_with_objects(store: MooncakeStore | FileStore) -> bool:
    """Whether a store stays when its run ends, as a folder does, and holds anything; whose, a sweep knows."""
    if isinstance(store, MooncakeStore) or not os.path.isdir(store.folder):
        return False
    return any(not name.startswith(".") for name in os.listdir(store.folder))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _visible(gpu: int) -> str:
    """The name of this launcher's n-th GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(gpu) if not visible else visible.split(",")[gpu]


def _reachable(host: str) -> str:
    """Where this machine reaches what binds to `host`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{reached}]" if ":" in reached else reached


def _require_free(master: str) -> None:
    host, port = host_and_port(master)
    try:
        socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
    except OSError:
        return
    raise ValueError(
        f"deployment.store.master is {master}, where something listens already; required: a free port, or "
        "the end of what uses it"
    )


def _captures(address: str) -> bool:
    try:
        CaptureClient(f"http://{address}", _PROBE_SECONDS).describe()
    except (ServerDown, RequestFailed):
        return False
    return True
