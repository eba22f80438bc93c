"""Apply and revert this package's patches of an installed SGLang, without importing it.

A version's patches (patches/sglang/<version>/*.patch, in the order of their names) come with the SHA-256 of
each file they touch, before the first patch and after the last (manifest.json). A file is therefore *stock*,
*patched* or *modified*, and a tree with a modified file is left as it is.

Invariant: each file is replaced as a whole, by a rename, and every state between two renames is one that
`apply` and `revert` go on from: a killed run is completed, or undone, by the next. A rename also leaves alone
the package cache that an installer may have linked the file from.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from specforge_capture.unified_diff import Hunk, apply_hunks, read_diff, reversed_hunks

PATCHES = Path(__file__).parent / "patches" / "sglang"
MANIFEST = "manifest.json"

Known = Literal["stock", "patched"]
KNOWN: tuple[Known, ...] = ("stock", "patched")
State = Known | Literal["modified", "missing"]


@dataclass(frozen=True)
class Patch:
    """One patch file: its name without suffix, what its first line says, and its hunks by file."""

    name: str
    summary: str
    hunks: dict[str, list[Hunk]]


@dataclass(frozen=True)
class PatchSet:
    """The patches of one version of SGLang, in a folder with their manifest."""

    folder: Path

    @cached_property
    def patches(self) -> list[Patch]:
        """In the order in which they are applied."""
        return [_read_patch(path) for path in sorted(self.folder.glob("*.patch"))]

    @cached_property
    def hashes(self) -> dict[str, dict[str, str]]:
        """For each touched file, relative to site-packages, its SHA-256 when `stock` and when `patched`."""
        return json.loads((self.folder / MANIFEST).read_text())

    def content(self, path: str, content: bytes, wanted: Known) -> bytes:
        """`content` of the file `path`, in its other state, brought into the state `wanted`."""
        for patch in self.patches if wanted == "patched" else reversed(self.patches):
            hunks = patch.hunks.get(path, [])
            content = apply_hunks(content, hunks if wanted == "patched" else reversed_hunks(hunks))
        return content


@dataclass(frozen=True)
class Installation:
    """An installed SGLang: its version, and the folder that holds the package `sglang`."""

    version: str
    root: Path

    @cached_property
    def patch_set(self) -> PatchSet:
        """The patches of this version. Raises ValueError where there are none."""
        folder = PATCHES / self.version.partition("+")[0]
        if not (folder / MANIFEST).is_file():
            supported = ", ".join(sorted(path.name for path in PATCHES.iterdir() if path.is_dir()))
            raise ValueError(
                f"{self.root} holds sglang {self.version}, which has no patches here: install {supported}"
            )
        return PatchSet(folder)

    def states(self) -> dict[str, State]:
        """The state of each file that the patches touch."""
        return {path: self._state(path) for path in self.patch_set.hashes}

    def _state(self, path: str) -> State:
        if not (self.root / path).is_file():
            return "missing"
        found = _sha256((self.root / path).read_bytes())
        return next((name for name in KNOWN if self.patch_set.hashes[path][name] == found), "modified")

    def changes(self, wanted: Known) -> dict[Path, bytes]:
        """The files to write, with their new contents, so that all are in the state `wanted`.

        Raises ValueError, naming the files, where one is modified or missing.
        """
        states = self.states()
        if foreign := [f"{path} is {state}" for path, state in states.items() if state not in KNOWN]:
            raise ValueError(
                f"the sglang {self.version} in {self.root} is not as released: {', '.join(foreign)}. "
                f"Reinstall it: pip install --force-reinstall --no-deps sglang=={self.version}"
            )
        changes = {}
        for path in (path for path, state in states.items() if state != wanted):
            content = self.patch_set.content(path, (self.root / path).read_bytes(), wanted)
            if _sha256(content) != self.patch_set.hashes[path][wanted]:
                raise ValueError(
                    f"the patches in {self.patch_set.folder} make another {path} than {MANIFEST}"
                )
            changes[self.root / path] = content
        return changes

    def bring(self, wanted: Known) -> list[Path]:
        """Bring all files into the state `wanted`; returns those that were written.

        Raises ValueError like `changes`, and while another process does the same.
        """
        with _locked(self.root / "sglang"):
            for path in self.patch_set.hashes:
                if (left := _temporary(self.root / path)).exists():  # by a run that was killed
                    left.unlink()
            changes = self.changes(wanted)
            _replace(changes)
        return list(changes)


def find_sglang(site: Path | None = None) -> Installation:
    """The SGLang of this interpreter, or of the site-packages folder `site`. Does not import it.

    Raises ValueError where there is none, or `site` only points to it.
    """
    place = site or "this interpreter's environment"
    if site:
        distributions = list(importlib.metadata.distributions(name="sglang", path=[str(site)]))
        spec = PathFinder.find_spec("sglang", [str(site)])
    else:
        distributions = list(importlib.metadata.distributions(name="sglang"))
        spec = importlib.util.find_spec("sglang")
    if not distributions:
        raise ValueError(f"found no sglang in {place}: name its site-packages folder with --site")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"{place} has the metadata of sglang {distributions[0].version} but not its files, as where it "
            "is installed in place (editable): run this with that environment's interpreter, without --site"
        )
    return Installation(distributions[0].version, Path(spec.submodule_search_locations[0]).parent)


def make_manifest(folder: Path, stock: Path) -> None:
    """Write the manifest of the patches in `folder`, from a tree of the files as they are released."""
    patch_set = PatchSet(folder)
    hashes = {}
    for path in sorted({path for patch in patch_set.patches for path in patch.hunks}):
        content = (stock / path).read_bytes()
        patched = patch_set.content(path, content, "patched")
        hashes[path] = {"stock": _sha256(content), "patched": _sha256(patched)}
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=2) + "\n")


def _read_patch(path: Path) -> Patch:
    text = path.read_text()
    try:
        files = read_diff(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Patch(path.stem, text.partition("\n")[0], {file.path: file.hunks for file in files})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.specforge-capture")


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Holds `folder` against another process that patches; the system lets go when this one ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process patches {folder}: wait until it has ended") from error
        yield
    finally:
        os.close(descriptor)


def _replace(contents: dict[Path, bytes]) -> None:
    """Give every file its new content. On any failure the files have what they had."""
    before = {path: path.read_bytes() for path in contents}
    renamed: list[Path] = []
    try:
        for path, content in contents.items():
            _write_beside(path, content)
        for path in contents:
            os.replace(_temporary(path), path)
            renamed.append(path)
    except BaseException:
        for path in contents:
            _temporary(path).unlink(missing_ok=True)
        for path in renamed:
            _write_beside(path, before[path])
            os.replace(_temporary(path), path)
        raise
    finally:
        for folder in {path.parent for path in contents}:
            _sync(folder)


def _write_beside(path: Path, content: bytes) -> None:
    """Write `content`, durably and with the mode of `path`, under the temporary name of `path`."""
    temporary = _temporary(path)
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    shutil.copymode(path, temporary)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
