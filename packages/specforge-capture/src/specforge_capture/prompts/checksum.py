"""Checksums of prompt files. Light to import: a launcher verifies them before anything starts."""

import hashlib
from pathlib import Path

from specforge_config.data import DataConfig


def file_sha256(path: Path) -> str:
    """64 hex digits over a prompt file's bytes.

    Raises:
        ValueError: if there is no such file.
    """
    if not path.is_file():
        raise ValueError(f"data.train: no file {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_checksum(data: DataConfig) -> None:
    """Check the training file against `data.sha256`, where that is set.

    Raises:
        ValueError: if the file is missing or has another checksum, naming both.
    """
    if data.sha256 is None:
        return
    (path,) = data.train
    if (found := file_sha256(Path(path))) != data.sha256:
        raise ValueError(f"{path}: its sha256 is {found}, but data.sha256 requires {data.sha256}")
