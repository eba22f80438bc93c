"""Real ranks for tests: processes of a fork server that has imported torch once, so that each starts in
milliseconds.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FunctionType
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "torch._dynamo", "torch.distributed.checkpoint", "specforge_train.trainer"]  # dynamo: by AdamW
)


@dataclass
class Ranks:
    """Started ranks of one world."""

    processes: list[BaseProcess]
    logs: list[Path]

    def wait(self, seconds: float) -> list[int]:
        """Exit codes, by rank. Fails the test with the ranks' output if they take longer."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.end()
        assert not late, f"ranks {late} took longer than {seconds} s\n{self.output()}"
        return [process.exitcode if process.exitcode is not None else 1 for process in self.processes]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what is still alive."""
        for process in self.processes:
            process.kill()
            process.join()

    def output(self) -> str:
        """What all ranks wrote to standard output and error."""
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs if log.exists())


def start_ranks(body: FunctionType, size: int, folder: Path, *arguments: Any) -> Ranks:
    """Start `body(*arguments)`, a function of a test's module, on `size` ranks; their output goes to
    `folder`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        job = (body.__code__.co_filename, body.__name__, arguments, environment, str(log))
        process = _CONTEXT.Process(target=_rank, args=job, daemon=True)
        process.start()
        processes.append(process)
    return Ranks(processes, logs)


def run_ranks(body: FunctionType, size: int, folder: Path, *arguments: Any, seconds: float = 180) -> None:
    """Run ranks to their end, and fail with their output if one fails."""
    ranks = start_ranks(body, size, folder, *arguments)
    codes = ranks.wait(seconds)
    assert codes == [0] * size, f"exit codes {codes}\n{ranks.output()}"


def _rank(path: str, name: str, arguments: tuple[Any, ...], environment: dict[str, str], log: str) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    runpy.run_path(path)[name](*arguments)
