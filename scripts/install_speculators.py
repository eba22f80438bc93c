#!/usr/bin/env python3
"""Put speculators 0.9 into `.cache/speculators`, for the test that it loads exported drafts.

    .venv/bin/python scripts/install_speculators.py

Beside the workspace's environment, whose packages it uses: only what that lacks is installed, 85 MB in
a few seconds, and `torchaudio` and `torchvision` are left out, which loading a draft does not need. Where it
lies already, nothing is done.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".cache" / "speculators"
REQUIREMENTS = ("speculators==0.9.0", "hs-connectors==0.9.0")


def main() -> None:
    """Install, unless the same is there."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    marker = FOLDER / "built-from"
    recipe = "\n".join((*REQUIREMENTS, sys.version, *sorted(_installed())))
    if not marker.is_file() or marker.read_text() != recipe:
        shutil.rmtree(FOLDER, ignore_errors=True)
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as excluded:
            excluded.write("\n".join((*_installed(), "torchaudio", "torchvision")))
            excluded.flush()
            uv = [ROOT / ".uv" / "bin" / "uv", "pip", "install", "-q", "--python", sys.executable]
            subprocess.run([*uv, "--target", FOLDER, "--excludes", excluded.name, *REQUIREMENTS], check=True)
        marker.write_text(recipe)
    print(FOLDER)


def _installed() -> set[str]:
    return {package.name for package in distributions()}


if __name__ == "__main__":
    main()
