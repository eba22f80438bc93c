"""Check that a release tag fits the tree, and print the package that it releases.

    python scripts/release.py specforge-config-v0.1.0

The tag `<package>-v<version>` needs that version in the package's pyproject.toml, and a dated entry of it
first in its CHANGELOG.md. Siblings must be pinned to their versions in the tree.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TAG = re.compile(r"(?P<package>specforge-[a-z]+)-v(?P<version>\d+\.\d+\.\d+)")
ENTRY = re.compile(r"^## \[(?P<version>\d[^]]*)\] - \d{4}-\d{2}-\d{2}$", re.MULTILINE)


def project(package: str) -> dict:
    """The [project] table of a package of this workspace."""
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def problems(package: str, version: str) -> list[str]:
    """What keeps `package` from being released as `version`."""
    found = []
    table = project(package)
    if table["version"] != version:
        found.append(f"pyproject.toml says {table['version']}, the tag {version}: change one")
    entry = ENTRY.search((ROOT / "packages" / package / "CHANGELOG.md").read_text())
    latest = entry["version"] if entry else None
    if latest != version:
        found.append(f"the newest dated entry of CHANGELOG.md is {latest}: add `## [{version}] - YYYY-MM-DD`")
    for requirement in table["dependencies"]:
        if requirement.startswith("specforge-"):
            name, _, pinned = requirement.partition("==")
            if pinned != (current := project(name)["version"]):
                found.append(f"requires {requirement}: pin it =={current}, the version in the tree")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tag", help="<package>-v<version>")
    tag = parser.parse_args().tag

    match = TAG.fullmatch(tag)
    if not match or not (ROOT / "packages" / match["package"]).is_dir():
        sys.exit(f"{tag} is no release tag: required is specforge-<name>-vX.Y.Z of a package under packages/")
    if found := problems(match["package"], match["version"]):
        sys.exit("\n".join(f"{match['package']}: {problem}" for problem in found))
    print(match["package"])


if __name__ == "__main__":
    main()
