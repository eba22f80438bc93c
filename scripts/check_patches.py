"""Check the patches of SGLang against the releases that they are for.

    python scripts/check_patches.py [--write]

Every supported version has its folder of patches. On a copy of its sources (sglang_sources.py), checks that
- the patches apply with `git apply --check`, and make what `git apply` makes;
- `specforge-capture patch` applies them, and does nothing when asked again; every touched file compiles;
- it reverts them to the released bytes, and leaves nothing behind.

With --write the manifests are made anew first, after a change of a patch. The kernels that the patches change
are tested on the same sources, in packages/specforge-capture/tests/sglang/test_k3_guards.py.
"""

import argparse
import py_compile
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_sources import DEFAULT_FOLDER as SOURCES
from sglang_sources import supported

from specforge_capture.patching import MANIFEST, PATCHES, PatchSet, find_sglang, make_manifest

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120


def make_site(version: str, site: Path) -> None:
    """Copy what makes an installation, and the folders that the patches touch; the rest is 4,000 files."""
    sources = SOURCES / version
    touched = {path for patch in PatchSet(PATCHES / version).patches for path in patch.hunks}
    folders = {(sources / path).parent for path in touched}
    wanted = {sources / "sglang/__init__.py", *sources.glob("*.dist-info/METADATA")}
    for path in wanted.union(*(folder.glob("*.py") for folder in folders)):
        copy = site / path.relative_to(sources)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)


def contents(site: Path) -> dict[str, bytes]:
    """All files that were copied, and what came to them."""
    return {
        path.relative_to(site).as_posix(): path.read_bytes() for path in site.rglob("*") if path.is_file()
    }


def run(*command: str | Path, cwd: Path) -> str | None:
    """Run a command; what it printed if it failed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)
    return (done.stdout + done.stderr) if done.returncode else None


def patched_by_git(version: str, stock: dict[str, bytes], folder: Path) -> dict[str, bytes] | str:
    """The touched files as `git apply` patches them, one patch after the other, or its complaint."""
    touched = find_sglang(folder).patch_set.hashes
    copy = folder.parent / "git"
    for path in touched:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(stock[path])
    for patch in sorted((PATCHES / version).glob("*.patch")):
        for check in (["--check"], []):
            if error := run("git", "apply", *check, patch, cwd=copy):
                return f"git apply {patch.name}: {error}"
    return {path: (copy / path).read_bytes() for path in touched}


def check(version: str, site: Path) -> Iterator[str]:
    """Problems with the patches of one version, on its sources in `site`."""
    stock = contents(site)
    git = patched_by_git(version, stock, site)
    if isinstance(git, str):
        yield git
        return
    command = (sys.executable, "-m", "specforge_capture.cli", "patch")
    if error := run(*command, "apply", "--site", site, cwd=ROOT):
        yield f"patch apply fails:\n{error}"
        return
    patched = contents(site)
    if different := {path for path, content in git.items() if patched[path] != content}:
        yield f"`patch apply` and `git apply` differ in {', '.join(sorted(different))}"
    if foreign := {path for path, _ in patched.items() ^ stock.items()} - git.keys():
        yield f"apply changes {', '.join(sorted(foreign))}, which are not in {MANIFEST}"
    for path in git:
        try:
            py_compile.compile(str(site / path), cfile=str(site.parent / "compiled.pyc"), doraise=True)
        except py_compile.PyCompileError as error:
            yield f"{path} does not compile: {error}"
    if find_sglang(site).bring("patched"):
        yield "a second apply changes files"
    if error := run(*command, "revert", "--site", site, cwd=ROOT):
        yield f"patch revert fails:\n{error}"
    if contents(site) != stock:
        yield "revert does not restore the released bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make the manifests anew first")
    write = parser.parse_args().write

    versions = supported()
    if missing := [version for version in versions if not (SOURCES / version).is_dir()]:
        sys.exit(f"{SOURCES} lacks {', '.join(missing)}: python3 scripts/sglang_sources.py")
    folders = sorted(path.name for path in PATCHES.iterdir() if path.is_dir())
    if folders != sorted(versions):
        sys.exit(f"there are patches of {', '.join(folders)}; required: of {', '.join(versions)}")
    problems = []
    for version in versions:
        with tempfile.TemporaryDirectory(prefix="patches-") as work:
            site = Path(work) / "site"
            make_site(version, site)
            if write:
                make_manifest(PATCHES / version, site)
            found = [f"{version}: {problem}" for problem in check(version, site)]
        count = len(PatchSet(PATCHES / version).patches)
        print(f"sglang {version}: {count} patches, {'failed' if found else 'in order'}")
        problems += found
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
