"""Runs of the real command on the shipped tiny target, shortened by overrides."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORT = [
    "draft.num_layers=1",
    "draft.target_layer_ids=[0, 2]",
    "draft.num_anchors=6",
    "draft.block_size=3",
    "draft.markov.rank=8",
    "data.max_length=96",
    "training.max_steps=null",
    "training.epochs=4",
    "training.global_batch_size=4",
    "training.log_every=1",
    "training.save_every=10",
    "evaluation.max_prompts=2",
    "evaluation.max_new_tokens=8",
    "evaluation.interval=20",
    "evaluation.interval_prompts=2",
    "tracking.samples=true",
    "deployment.trainer.device=cpu",
    "deployment.trainer.cpu_threads=1",
]


class Launched:
    """A `specforge-launch run` that is going on."""

    def __init__(self, folder: Path, arguments: list[str], cwd: Path) -> None:
        """Start it in `cwd`."""
        self.folder = folder
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "specforge_launch.cli",
                "run",
                "quickstart",
                f"output_dir={folder}",
                *arguments,
            ],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "160"},
        )

    def end(self, timeout: float = 240) -> "Ended":
        """Wait for its end."""
        out, err = self.process.communicate(timeout=timeout)
        return Ended(self.folder, self.process.returncode, out, err)

    def events(self) -> list[dict[str, Any]]:
        """What rank 0 has reported."""
        path = self.folder / "progress.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def forget(self) -> None:
        """Right after a start: drop what an earlier one reported, so that it is not waited for."""
        (self.folder / "progress.jsonl").unlink(missing_ok=True)

    def wait_for(self, reached: Callable[[dict[str, Any]], bool], timeout: float = 240) -> dict[str, Any]:
        """The first event for which `reached` holds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            found = [event for event in self.events() if reached(event)]
            if found:
                return found[0]
            assert self.process.poll() is None, self.end()
            time.sleep(0.02)
        raise TimeoutError(f"not reached within {timeout} s: {self.events()[-3:]}")

    def wait_for_step(self, step: int, timeout: float = 240) -> None:
        """Wait until an optimizer step of this start is done."""
        self.wait_for(lambda event: event["stage"] == "train" and event["step"] >= step, timeout)

    def halt(self, step: int) -> list[int]:
        """Stop the ranks (SIGSTOP) soon after a step, however fast steps are; their process ids."""
        self.wait_for(lambda event: event["stage"] in ("untrained", "train"))
        ranks = list(self.ranks().values())
        self.wait_for_step(step)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        return ranks

    def interrupt(self, halted: list[int]) -> None:
        """Ctrl-C, then let halted ranks go on once it has been passed to them."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 20
        while not (self.folder / "stop").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for pid in halted:
            os.kill(pid, signal.SIGCONT)

    def ranks(self) -> dict[int, int]:
        """Rank -> process id."""
        found = {}
        for pid, command in processes_of(self.folder).items():
            if "specforge_launch.worker" in command and "specforge_launch.agent" not in command:
                environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                found |= {int(line[5:]): pid for line in environment if line.startswith("RANK=")}
        return found


class Ended:
    """A run that has ended."""

    def __init__(self, folder: Path, code: int, out: str, err: str) -> None:
        """Keep what it printed."""
        self.folder, self.code, self.out, self.err = folder, code, out, err

    def __repr__(self) -> str:
        """What to see of it in a failed test."""
        logs = "\n".join(path.read_text()[-3000:] for path in sorted((self.folder / "logs").glob("*.log")))
        return f"exit code {self.code}\n{self.out}\n{self.err}\n{logs}"

    def rows(self, key: str = "loss") -> list[dict[str, Any]]:
        """Rows of its metrics that hold `key`."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if key in row]

    def samples(self, rank: int = 0) -> list[tuple[int, list[list[Any]]]]:
        """(step, its samples) as a rank recorded them."""
        lines = (self.folder / f"samples.rank{rank}.jsonl").read_text().splitlines()
        return [(row["step"], row["samples"]) for row in map(json.loads, lines)]

    @property
    def summary(self) -> dict[str, Any]:
        """Its table."""
        return json.loads((self.folder / "summary.json").read_text())


def processes_of(folder: Path) -> dict[int, str]:
    """Process id -> command line of what runs for `folder`, launchers and zombies left out: what names it,
    and what writes into its logs, as servers and their children do."""
    found = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            command = (path / "cmdline").read_bytes().decode().replace("\0", " ")
            log = os.readlink(path / "fd" / "1")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        ours = ("specforge_launch.worker", "specforge_launch.agent", "specforge_launch.roles")
        if log.startswith(f"{folder}/logs/") or (
            str(folder) in command and any(name in command for name in ours)
        ):
            found[int(path.name)] = command
    return found


def pid_of(folder: Path, part: str) -> int:
    """The process whose log is `<part>.log`; of a server with children, itself."""
    log = f"{folder}/logs/{part}.log"
    return min(pid for pid in processes_of(folder) if os.readlink(f"/proc/{pid}/fd/1") == log)


def require_no_process(folder: Path, timeout: float = 10) -> None:
    """Check that all processes of a run are gone soon."""
    deadline = time.monotonic() + timeout
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left
