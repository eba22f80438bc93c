#!/usr/bin/env python3
"""Unpack the sources of every supported SGLang: our hooks, patches and kernel tests are checked against them.

    python3 scripts/sglang_sources.py [--folder .cache/sglang-sources]

A wheel is 10 to 40 MB; a version that lies there already is left alone. Any Python with pip will do: the
sources are read, not run. Each folder holds the Python and CUDA sources and the metadata of the wheel, at
their places in site-packages.
"""

import argparse
import ast
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_FOLDER = ROOT / ".cache" / "sglang-sources"
VERSIONS = ROOT / "packages/specforge-capture/src/specforge_capture/sglang/versions.py"
WANTED = (".py", ".cuh", ".dist-info/METADATA")
LIMIT_S = 300


def main() -> None:
    """Parse the command line and unpack what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="a folder a version goes here")
    folder = parser.parse_args().folder
    for version in supported():
        if not any((folder / version).glob("*.dist-info/METADATA")):
            try:
                unpack(version, folder)
            except subprocess.SubprocessError:
                sys.exit(
                    f"sglang {version} is not in {folder}, and pip could not download it (see above); "
                    "required: a package index, or that folder from another machine"
                )
        print(folder / version)


def supported() -> list[str]:
    """The supported versions, read from where they are listed: importing that would take torch."""
    for node in ast.parse(VERSIONS.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"{VERSIONS} lists no versions")


def unpack(version: str, folder: Path) -> None:
    """Download the wheel of a version and unpack its sources to `folder/version`.

    Raises:
        subprocess.SubprocessError: if it cannot be downloaded; pip has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
        patience = ["--retries=1", "--timeout=15"]  # without an index, pip ends within a minute
        wanted = ["--only-binary=:all:", "--python-version=3.11", "--no-deps", f"sglang=={version}"]
        subprocess.run([*pip, *patience, *wanted, "-d", scratch], check=True, timeout=LIMIT_S)
        (wheel,) = Path(scratch).glob("*.whl")
        sources = Path(scratch) / "sources"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sources, [name for name in archive.namelist() if name.endswith(WANTED)])
        if (folder / version).is_dir():
            shutil.rmtree(folder / version)
        sources.rename(folder / version)


if __name__ == "__main__":
    main()
