"""Checkpoints of a run: model, optimizer and the record of what they belong to.

Invariant: a folder `checkpoints/step-<n>` is whole or is not trusted. It is written under a temporary name,
every file synced to the disk, then renamed; `latest` moves after it. Its `meta.json` lists size and SHA-256
of every other file, and a folder that disagrees is passed over for the next older one. So a run killed at any
moment resumes from its newest whole checkpoint.

A checkpoint resumes only the run that it belongs to: the plan (seeds, data, batch, islands, ...) and the
capture contract are recorded, and any value that differs is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from specforge_config.features import CaptureSpec
from specforge_train.optim import optimizer_state
from specforge_train.parallel import World

FORMAT = 1
META = "meta.json"


class Checkpoints:
    """The checkpoints of one run. Every method is a collective: call it on all ranks."""

    def __init__(
        self,
        folder: Path,
        world: World,
        plan: Mapping[str, Any],
        spec: CaptureSpec,
        *,
        keep: int = 2,
        resume: Literal["auto", "never", "required"] = "auto",
    ) -> None:
        """Find where the run stands, and remove what an interrupted save left.

        Args:
            folder: the run's folder, on a file system that all ranks share.
            world: the ranks.
            plan: JSON values that must be the same for a resumed run to continue as if it had not stopped.
            spec: the capture contract of this run.
            keep: newest checkpoints to keep.
            resume: `training.resume`.

        Raises:
            ValueError: if the newest whole checkpoint belongs to another plan or contract, if `never` finds
                one, or `required` none.
        """
        self.folder = folder
        self.world = world
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self.spec = spec
        self.keep = keep
        self.path: Path | None = world.on_main(lambda: self._open(resume))
        """The checkpoint to resume from; None on a fresh start."""
        meta = {"step": 0, "totals": {}} if self.path is None else read_meta(self.path)
        self.step: int = meta["step"]
        """Optimizer steps that were done before this start."""
        self.totals: dict[str, float] = meta["totals"]
        """What earlier starts added up."""
        self.newest: Path | None = self.path
        """The newest checkpoint."""
        self.newest_step: int = self.step
        """The step of `newest`, 0 without one."""

    @property
    def root(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load `path` into a sharded model and its optimizer, in place, whatever the sharding it was saved
        under.
        """
        assert self.path is not None
        dcp.load(_state(model, optimizer), storage_reader=dcp.FileSystemReader(self.path))

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, totals: Mapping[str, float]
    ) -> Path:
        """Write the checkpoint of `step` and remove the oldest ones beyond `keep`.

        Args:
            step: optimizer steps done.
            model: the sharded draft.
            optimizer: from `build_adamw`.
            totals: what a later start goes on adding up.

        Raises:
            ValueError: on every rank, if the disk is full or not writable; earlier checkpoints are left as
                they were.
        """
        temporary = self.root / f".partial-{_name(step)}"
        try:
            self.world.on_main(lambda: _empty(temporary))
            dcp.save(_state(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary))
            # Each rank sums up what it wrote, which it still has in memory.
            own = [
                *temporary.glob(f"__{self.world.rank}_*"),
                *(temporary.glob(".metadata") if self.world.main else ()),
            ]
            files = {name: seal for part in self.world.gather(_seals(own)) for name, seal in part.items()}
            meta = {
                "format": FORMAT,
                "version": _release(),
                "step": step,
                "totals": dict(totals),
                "plan": self.plan,
                "capture": self.spec.model_dump(mode="json"),
                "files": files,
            }
            self.newest, self.newest_step = self.world.on_main(lambda: self._publish(temporary, meta)), step
            return self.newest
        except (CheckpointException, OSError) as error:  # the former is what torch makes of a rank's OSError
            if self.world.main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise ValueError(
                f"the checkpoint of step {step} could not be written to {self.root}: {_reason(error)}; "
                "earlier checkpoints are intact: free space, lower training.keep_checkpoints or set "
                "output_dir to another disk, then resume"
            ) from error

    def _open(self, resume: str) -> Path | None:
        for stale in self.root.glob(".partial-*"):
            shutil.rmtree(stale)
        path = newest_checkpoint(self.folder)
        if path is None:
            if resume == "required":
                raise ValueError(f"training.resume is required, but {self.root} holds no whole checkpoint")
            return None
        if resume == "never":
            raise ValueError(
                f"training.resume is never, but {path} exists: set output_dir to a new folder, or "
                "training.resume to auto"
            )
        self._require_same_run(path)
        return path

    def _require_same_run(self, path: Path) -> None:
        meta = read_meta(path)
        if meta["format"] != FORMAT:
            raise ValueError(
                f"{path} has checkpoint format {meta['format']}, required {FORMAT}: start in a new output_dir"
            )
        saved = meta["plan"]
        names = [name for name in {**saved, **self.plan} if saved.get(name) != self.plan.get(name)]
        if names:
            rows = "\n".join(
                f"  {name}: {self.plan.get(name)!r} (this run) != {saved.get(name)!r}" for name in names
            )
            raise ValueError(
                f"{path} belongs to another plan, so that samples would be repeated or skipped:\n{rows}\n"
                "restore these settings, or set output_dir to a new folder (draft.init_from takes over the "
                "weights alone)"
            )
        CaptureSpec(**meta["capture"]).require_equal(
            self.spec, here=f"the checkpoint {path}", there="this run"
        )

    def _publish(self, temporary: Path, meta: dict[str, Any]) -> Path:
        _write_synced(temporary / META, json.dumps(meta, indent=1))
        _sync_folder(temporary)
        path = self.root / _name(meta["step"])
        if path.exists():  # one that was found not to be whole
            shutil.rmtree(path)
        temporary.rename(path)
        _sync_folder(self.root)
        _write_synced(self.root / ".latest", path.name)
        (self.root / ".latest").replace(self.root / "latest")
        _sync_folder(self.root)
        older = [other for other in _by_age(self.root) if _step(other) <= meta["step"]]
        for other in older[self.keep :]:
            shutil.rmtree(other)
        return path


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run's folder; what is not whole is passed over with a warning."""
    for path in _by_age(folder / "checkpoints"):
        if (damage := find_damage(path)) is None:
            return path
        warnings.warn(f"{path} is not whole and is passed over: {damage}", stacklevel=2)
    return None


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if they are those that were written."""
    try:
        expected = {name: tuple(seal) for name, seal in read_meta(path)["files"].items()}
    except (OSError, json.JSONDecodeError, KeyError) as error:
        return f"{META} is unreadable ({error})"
    wrong = [name for name, (size, _) in expected.items() if not _has_size(path / name, size)]
    if not wrong:
        found = _seals([path / name for name in expected])
        wrong = [name for name, seal in expected.items() if found[name] != seal]
    return f"{', '.join(wrong)} missing, cut short or changed" if wrong else None


def read_meta(path: Path) -> dict[str, Any]:
    """The record beside a checkpoint's tensors: format, version, step, totals, plan, capture, files."""
    return json.loads((path / META).read_text())


def _release() -> str:
    """The release of this package that wrote a checkpoint."""
    try:
        return version("specforge-train")
    except PackageNotFoundError:  # run from its sources
        return "source"


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state(model, optimizer)}


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _by_age(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    return sorted(root.glob("step-*"), key=_step, reverse=True)


def _empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _seals(paths: list[Path]) -> dict[str, tuple[int, str]]:
    """Name -> (size, SHA-256) of files; hashing leaves the interpreter lock, so that files are read side by
    side.
    """

    def seal(path: Path) -> tuple[int, str]:
        with path.open("rb") as file:
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip((path.name for path in paths), pool.map(seal, paths), strict=True))


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {cause!r}" for rank, (cause, _) in error.failures.items())
    return str(error)
