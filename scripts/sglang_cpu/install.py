#!/usr/bin/env python3
"""Build an environment that runs SGLang 0.5.18 on a CPU, for the tests of the `sglang` target backend.

    python3 scripts/sglang_cpu/install.py [--folder .cache/sglang-cpu] [--python python3.11]

It takes 1.6 GB and two minutes. Where it lies already and nothing that it is made from has changed,
nothing is done. pip's own settings say where packages come from: for a torch without CUDA, point
PIP_EXTRA_INDEX_URL at https://download.pytorch.org/whl/cpu or PIP_FIND_LINKS at a folder of wheels.

The packages of this workspace are installed in place (editable), with `specforge-launch` beside them.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEFAULT_FOLDER = ROOT / ".cache" / "sglang-cpu"


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where the environment lies")
    parser.add_argument("--python", default=sys.executable, help="interpreter, CPython 3.11")
    arguments = parser.parse_args()
    print(build(arguments.folder, arguments.python))


def build(folder: Path, python: str) -> Path:
    """Build the environment unless it is there already.

    Args:
        folder: where it lies; a half-built or outdated one is brought up to date.
        python: the interpreter that makes it.

    Returns:
        its interpreter.

    Raises:
        subprocess.CalledProcessError: if a package cannot be installed.
    """
    interpreter, marker, recipe = folder / "bin" / "python", folder / "built-from", digest()
    if marker.is_file() and marker.read_text() == recipe:
        return interpreter
    subprocess.run([python, "-m", "venv", folder], check=True)
    pip = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", HERE / "requirements.txt"], check=True)
    subprocess.run([*pip, "--no-deps", "-r", HERE / "requirements-alone.txt"], check=True)
    members = [argument for member in members_of(ROOT) for argument in ("-e", member)]
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", *members], check=True)
    site = subprocess.run(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    packages = Path(site.stdout.strip())
    for module in (HERE / "stand_ins").glob("*.py"):
        shutil.copy(module, packages)
    (packages / "specforge_sglang_stand_ins.pth").write_text("import specforge_sglang_stand_ins\n")
    marker.write_text(recipe)
    return interpreter


def members_of(root: Path) -> list[Path]:
    """The workspace's packages."""
    return sorted(project.parent for project in root.glob("packages/*/pyproject.toml"))


def digest() -> str:
    """A hash of all that the environment is made from."""
    sources = [*HERE.glob("*.txt"), *HERE.glob("stand_ins/*.py"), *ROOT.glob("packages/*/pyproject.toml")]
    content = b"".join(path.read_bytes() for path in sorted(sources))
    return hashlib.sha256(content + str(ROOT).encode()).hexdigest()


if __name__ == "__main__":
    main()
