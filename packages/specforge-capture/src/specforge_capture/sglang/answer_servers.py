"""SGLang servers that answer prompts, for as long as a block lasts: started, awaited, ended.

Each takes `engine.tp_size` GPUs, and together they take all of this machine; on a CPU there is one.
Invariant: none outlives the block, nor the process that started it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from specforge_capture.http_client import RequestFailed, RequestRefused, ServerClient, ServerDown
from specforge_capture.sglang.engine_args import engine_environment, resolve_answering_arguments
from specforge_capture.sglang.leftovers import mapped_by_group, remove_unmapped
from specforge_capture.sglang.versions import installed_version
from specforge_capture.stores.master import free_ports
from specforge_capture.tied import tied
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape

_HOST = "127.0.0.1"
_PROBE_SECONDS = 5.0
_TICK_SECONDS = 0.2
_END_SECONDS = 30.0
_TAIL_LINES = 20


@dataclass(frozen=True)
class _Started:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").rstrip().splitlines()[-_TAIL_LINES:]
        return f"the end of {self.log}:\n" + "\n".join(lines)


def require_sglang() -> None:
    """Check that servers can be started here.

    Raises:
        ValueError: if SGLang is not installed.
    """
    try:
        installed_version()
    except ValueError as error:
        raise ValueError(f"{error}, or regeneration.servers that run elsewhere") from None


@contextmanager
def answer_servers(config: RunConfig, device: Literal["cpu", "cuda"], logs: Path) -> Generator[list[str]]:
    """Servers of the target.

    Args:
        config: the run.
        device: where they compute.
        logs: prefix of their log files.

    Yields:
        Their addresses, `http://host:port`, once all of them answer.

    Raises:
        ValueError: if SGLang is not installed, for settings that it cannot serve with, and for too few GPUs.
        ServerDown: if one ends, or does not answer within `regeneration.startup_seconds`; with the end of its
            log, also where the block raised it.
    """
    require_sglang()
    target = read_target_shape(config.target.path)
    arguments = resolve_answering_arguments(config, target, device).command_line()
    environment = {**os.environ, **engine_environment(device, config.engine.tp_size)}
    started: list[_Started] = []
    try:
        places = [None] if device == "cpu" else _places(config.engine.tp_size)
        for (index, gpus), port in zip(enumerate(places), free_ports(len(places)), strict=True):
            variables = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
            started.append(_start(arguments, port, environment | variables, Path(f"{logs}{index}.log")))
        _await(started, config.regeneration.startup_seconds)
        yield [server.url for server in started]
    except ServerDown as error:
        _require_alive(started, _PROBE_SECONDS, error)
        raise
    finally:
        _stop(started)


def _places(tp_size: int) -> list[str | None]:
    """`CUDA_VISIBLE_DEVICES` of each server.

    Raises:
        ValueError: if the GPUs are too few for one.
    """
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",")[:count] if visible else [str(gpu) for gpu in range(count)]
    if count < tp_size:
        raise ValueError(f"engine.tp_size is {tp_size}; required: at most the GPUs of this machine, {count}")
    return [",".join(gpus[first : first + tp_size]) for first in range(0, count - tp_size + 1, tp_size)]


def _start(arguments: Sequence[str], port: int, environment: dict[str, str], log: Path) -> _Started:
    listen = ("--host", _HOST, "--port", str(port), "--log-level", "warning", "--log-level-http", "warning")
    with open(log, "ab") as output:
        process = subprocess.Popen(
            tied([sys.executable, "-m", "sglang.launch_server", *listen, *arguments]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Safe path: a module of the working directory never shadows an installed one.
            env={**environment, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
    return _Started(process, f"http://{_HOST}:{port}", log)


def _await(started: Sequence[_Started], seconds: float) -> None:
    deadline, silent = time.monotonic() + seconds, list(started)
    while silent:
        _require_alive(started)
        if time.monotonic() > deadline:
            raise ServerDown(
                f"the SGLang server does not answer after {seconds:g} s (regeneration.startup_seconds); "
                f"{silent[0].tail()}"
            )
        silent = [server for server in silent if not _answers(server.url)]
        time.sleep(_TICK_SECONDS)


def _require_alive(
    started: Sequence[_Started], seconds: float = 0.0, cause: ServerDown | None = None
) -> None:
    """A process that broke its connections may take some `seconds` until it is seen to have ended."""
    deadline = time.monotonic() + seconds
    while True:
        for server in started:
            if (code := server.process.poll()) is not None:
                raise ServerDown(f"the SGLang server ended with code {code}; {server.tail()}") from cause
        if time.monotonic() >= deadline:
            return
        time.sleep(_TICK_SECONDS)


def _answers(url: str) -> bool:
    try:
        ServerClient(url, _PROBE_SECONDS).ask("GET", "/server_info")
    except (ServerDown, RequestFailed, RequestRefused):
        return False
    return True


def _stop(started: Sequence[_Started]) -> None:
    """End the servers with their children, which keep nothing, and remove what they leave."""
    shared: set[Path] = set()
    for server in started:
        shared |= mapped_by_group(server.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
    for server in started:
        with suppress(subprocess.TimeoutExpired):  # one that the kernel holds
            server.process.wait(_END_SECONDS)
    remove_unmapped(shared)
