"""The file that answers are written to, safe against being stopped or killed at any moment.

While the target answers, whole conversations are appended to `<output>.partial` in the order in which they
end. At the end they are sorted into the order of the prompts and renamed to the output; its manifest follows.
The output's bytes thus do not depend on interruptions.

Invariant: what is resumed was begun under the same settings. They are the first line of the partial file.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specforge_config.run import RunConfig

Settings = dict[str, Any]
Row = dict[str, Any]


def output_path(config: RunConfig) -> Path:
    """Where the answers of a run go."""
    return Path(config.regeneration.output or Path(config.folder) / "answers.jsonl")


def manifest_path(output: Path) -> Path:
    """Where the manifest of `output` lies."""
    return output.with_name(output.name + ".manifest.json")


def partial_path(output: Path) -> Path:
    """Where rows of `output` wait until all are there."""
    return output.with_name(output.name + ".partial")


def finished_manifest(output: Path, settings: Settings) -> dict[str, Any] | None:
    """The manifest of an output that was finished under these settings; None where none was finished.

    Raises:
        ValueError: if the output was made under other settings, by something else, or changed afterwards.
    """
    path = manifest_path(output)
    if not output.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{output} exists without {path.name}: set regeneration.output to another file")
    manifest = json.loads(path.read_text())
    _require_same(manifest["settings"], settings, output)
    if (found := file_sha256(output)) != manifest["sha256"]:
        raise ValueError(
            f"{output} has the SHA-256 {found}, its manifest says {manifest['sha256']}: it was changed; "
            "remove it, or set regeneration.output to another file"
        )
    return manifest


def file_sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Journal:
    """Rows that are done, on the disk; made by `open_journal`."""

    def __init__(self, output: Path, file: IO[str], settings: Settings, rows: dict[int, Row]) -> None:
        self.output, self.settings = output, settings
        self.rows = rows
        """Index of the row -> what was written; rows that gave no conversation have a `reason`."""
        self._file = file

    def add(self, index: int, row: Row) -> None:
        """Write a row; it is kept from then on, also if the process is killed."""
        self.rows[index] = row
        self._file.write(json.dumps({"index": index, "row": row}, ensure_ascii=False) + "\n")
        self._file.flush()

    def finish(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Write the output and its manifest, and return the manifest.

        Args:
            facts: what the manifest says beside the settings and the output's checksum.
        """
        staged = self.output.with_name(self.output.name + ".new")
        with staged.open("w", encoding="utf-8") as file:
            for _, row in sorted(self.rows.items()):
                if "reason" not in row:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
            _sync(file)
        manifest = {"settings": self.settings, **facts, "sha256": file_sha256(staged)}
        described = self.output.with_name(self.output.name + ".manifest.new")
        with described.open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            _sync(file)
        described.replace(manifest_path(self.output))
        staged.replace(self.output)
        partial_path(self.output).unlink()
        return manifest


@contextmanager
def open_journal(output: Path, settings: Settings) -> Generator[Journal]:
    """The journal of `output`, with the rows that an earlier start kept.

    Raises:
        ValueError: if another process writes it, it was begun under other settings, or it is damaged.
    """
    path = partial_path(output)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"regeneration.output: cannot write {path}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path} is being written by another process: wait for it, or set regeneration.output"
            ) from None
        yield Journal(output, file, settings, _recover(path, file, settings))
        _sync(file)


def _recover(path: Path, file: IO[str], settings: Settings) -> dict[int, Row]:
    """Rows in the file, which is cut behind its last whole line; one without rows is begun anew."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    # Not str.splitlines: a string in JSON may hold U+2028 and other ends of a line that are not a file's.
    lines = whole.splitlines()
    try:
        begun = json.loads(lines[0])["settings"] if lines else settings
        parsed = [json.loads(line) for line in lines[1:]]
        rows = {row["index"]: row["row"] for row in parsed}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it to begin anew") from error
    if rows:
        _require_same(begun, settings, path)
    else:  # nothing binds the settings yet
        os.truncate(path, 0)
        file.write(json.dumps({"settings": settings}, ensure_ascii=False) + "\n")
        file.flush()
    return rows


def _require_same(found: Settings, wanted: Settings, path: Path) -> None:
    wanted = json.loads(json.dumps(wanted))
    different = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if different:
        lines = [f"{name}: {found.get(name)!r} there, {wanted.get(name)!r} now" for name in different]
        raise ValueError(
            f"{path} was made under other settings:\n  " + "\n  ".join(lines) + "\nremove it, or set "
            "regeneration.output to another file"
        )


def _sync(file: IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
