"""Keep the locks in step: uv.lock is the authority, Pants' locks are exported from it.

    python scripts/lock.py            resolve uv.lock anew where a pyproject.toml changed, export the others
    python scripts/lock.py --check    change nothing; exit 1 naming each lock that is out of step

uv.lock names the public index alone: whatever index or folder of wheels this machine is set to is not used.
"""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = "https://pypi.org/simple"
FILES = "https://files.pythonhosted.org/"

# Pants tests what needs no torch: specforge-config, with the tools that do it.
PANTS_LOCKS = {
    "3rdparty/config.lock": ["--package", "specforge-config", "--no-dev"],
    "3rdparty/tools.lock": ["--only-group", "pants"],
}
HEADER = "# Exported from uv.lock by `make lock`; do not edit.\n"


def uv(*arguments: str) -> str:
    """Run uv in the workspace, without the machine's own index settings, and return what it printed.

    Ends the script where uv fails: uv has then said why.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    }
    command = [os.environ.get("UV", "uv"), *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    if result.returncode:
        sys.exit(f"failed: uv {' '.join(arguments)}")
    return result.stdout


def foreign_sources(lock: str) -> list[str]:
    """Places other than the public index and the workspace that `lock`, the text of a uv.lock, names."""
    registries = set(re.findall(r'registry = "([^"]*)"', lock)) - {INDEX}
    urls = {url for url in re.findall(r'\burl = "([^"]*)"', lock) if not url.startswith(FILES)}
    folders = set(re.findall(r'(?:path|directory|find-links) = "([^"]*)"', lock))
    return sorted(registries | urls | folders)


def export(options: list[str]) -> str:
    """Requirements, pinned, of one part of uv.lock, as Pants reads them."""
    return HEADER + uv(
        "export",
        "--frozen",
        "--quiet",
        "--format=requirements-txt",
        "--no-hashes",
        "--no-annotate",
        "--no-header",
        "--no-emit-workspace",
        *options,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a lock is out of step"
    )
    check = parser.parse_args().check

    uv("lock", "--quiet", f"--default-index={INDEX}", *(["--check"] if check else []))
    problems = [f"uv.lock names {source}" for source in foreign_sources((ROOT / "uv.lock").read_text())]
    for name, options in PANTS_LOCKS.items():
        path, wanted = ROOT / name, export(options)
        if not check:
            path.write_text(wanted)
        elif not path.exists() or path.read_text() != wanted:
            problems.append(f"{name} is not what uv.lock exports: run `make lock`")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
