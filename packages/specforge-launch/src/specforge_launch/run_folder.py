"""The output folder of a run: its files, and the lock that lets one launcher a node work in it."""

import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specforge_capture.locks import hold


class RunFolder:
    """Paths of a run."""

    def __init__(self, path: str | Path) -> None:
        """Name the files of the run in `path`; nothing is made."""
        self.path = Path(path)
        self.resolved = self.path / "resolved.yaml"
        self.progress = self.path / "progress.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.untrained = self.path / "untrained.json"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.errors = self.path / "errors"
        self.logs = self.path / "logs"
        self.stop = self.path / "stop"

    @property
    def has_checkpoint(self) -> bool:
        """Whether a run could go on from here."""
        return any(self.checkpoints.glob("step-*"))

    def read_summary(self) -> dict[str, Any] | None:
        """The table of a finished run."""
        return json.loads(self.summary.read_text()) if self.summary.is_file() else None

    def launch(self, part: str) -> Path:
        """What a part of the run is started with; that of ranks becomes `resolved.yaml` once they accept
        it."""
        return self.path / f".launch.{part}.yaml"

    def error(self, name: str) -> Path:
        """Where a process beside the ranks records why it failed."""
        return self.errors / f"{name}.json"

    def log(self, name: str) -> Path:
        """What a process beside the ranks prints."""
        return self.logs / f"{name}.log"

    def exits(self, node: int) -> Path:
        """Where a node's agent writes how its ranks failed."""
        return self.errors / f"exits.node{node}.json"

    def rank_errors(self) -> list[Path]:
        """What ranks recorded of why they failed (`specforge_train.abort`)."""
        return list(self.errors.glob("rank-*.json"))

    def all_exits(self) -> list[Path]:
        """What the agents of all nodes wrote, by node."""
        return sorted(self.errors.glob("exits.node*.json"))

    def clear(self, services: Iterable[str]) -> None:
        """Remove what an earlier start of processes beside the ranks left of errors."""
        for path in (self.errors, self.logs):
            path.mkdir(parents=True, exist_ok=True)
        for name in services:
            self.error(name).unlink(missing_ok=True)

    def clear_node(self, node: int) -> None:
        """Remove what an earlier start of ranks left: errors; on node 0 progress and a stop request too.

        Errors of all nodes' ranks, also of more ranks than this run has: none of its own can be among them,
        for ranks start once all nodes have met.
        """
        own = (self.stop, self.progress) if node == 0 else ()
        for path in (*self.rank_errors(), *self.all_exits(), *own):
            path.unlink(missing_ok=True)

    @contextmanager
    def lock(self, part: str) -> Generator[IO[str], None, None]:
        """Hold the lock of a part of the run, such as node0, on the folder. It ends with the last process
        that has the file open.

        Raises:
            ValueError: if another launcher holds it, naming its process, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output_dir: cannot write {self.path}: {error}") from error
        path = self.path / f".lock.launch-{part}"
        with hold(
            path,
            lambda holder: (
                f"{self.path} is in use by the run of process {holder}: "
                "wait for it, stop it, or set output_dir to another folder"
            ),
        ) as file:
            yield file


class Follower:
    """Reads what is appended to a file, whole lines only."""

    def __init__(self, path: Path) -> None:
        """Start at the present end of `path`, which may not exist yet."""
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """The lines that were finished since the last call; of a bar that is drawn over itself, its end."""
        if not self._path.exists():
            return []
        if self._path.stat().st_size < self._offset:  # begun anew
            self._offset = 0
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole + newline)
        lines = whole.decode(errors="replace").split("\n") if newline else []
        return [shown(line) for line in lines]


def shown(line: str) -> str:
    """What a terminal shows of a line: of a bar that was drawn over itself, its end."""
    return line.rstrip().rpartition("\r")[2]
