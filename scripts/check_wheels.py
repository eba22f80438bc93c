"""Check the packages as their users get them: each wheel alone in a clean virtual environment.

    python scripts/check_wheels.py [--pants dist]

Builds each package's sdist, and its wheel from that sdist, and checks that
- the wheel holds what lies under src/, followed through links, and nothing else, besides the LICENSE;
- siblings are pinned `==` their version, and each module that the code imports is declared or in an extra;
- with its declared dependencies alone, every module imports and every command answers `--help`;
- specforge-config imports no torch, in under 0.3 s;
- specforge-capture applies the patches that it holds to every supported SGLang (see sglang_sources.py);
- with --pants, Pants has packaged the same wheels, byte for byte, and complete sdists.

torch is 3 GB: it is not installed again but linked, with what it requires itself, from the environment that
runs this script. The other versions are those of uv.lock.
"""

import argparse
import ast
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from dataclasses import dataclass
from email.parser import Parser
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath

from check_patches import make_site
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sglang_sources import supported

ROOT = Path(__file__).resolve().parent.parent
IMPORT_LIMIT_S = 0.3
LIMIT_S = 300

# Modules whose distribution the environment does not tell: one of several extras, or part of another.
MOONCAKE = "mooncake-transfer-engine"
DISTRIBUTIONS = {
    "mooncake": {MOONCAKE, f"{MOONCAKE}-non-cuda", f"{MOONCAKE}-cuda13"},
    "triton": {"torch"},
}

IMPORT_MODULES = """
import importlib, sys
optional, *modules = sys.argv[1:]
for module in modules:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in optional.split(","):
            raise
"""

TIME_IMPORT = """
import sys, time
start = time.process_time()
import specforge_config
print(time.process_time() - start, "torch" in sys.modules)
"""


@dataclass(frozen=True)
class Wheel:
    """A built wheel, and the folder of the package it was built from."""

    path: Path
    source: Path

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @cached_property
    def files(self) -> dict[str, bytes]:
        with zipfile.ZipFile(self.path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    @property
    def dist_info(self) -> str:
        return "-".join(self.path.name.split("-")[:2]) + ".dist-info"

    @cached_property
    def requirements(self) -> list[Requirement]:
        """Declared dependencies, those of extras included."""
        message = Parser().parsestr(self.files[f"{self.dist_info}/METADATA"].decode())
        return [Requirement(line) for line in message.get_all("Requires-Dist", [])]

    def required(self, *, extra: bool) -> set[str]:
        """Names of the distributions required always, or (`extra`) through an extra alone."""
        return {
            canonicalize_name(requirement.name)
            for requirement in self.requirements
            if ("extra ==" in str(requirement.marker)) == extra
        }

    @property
    def version(self) -> str:
        return self.path.name.split("-")[1]

    @property
    def commands(self) -> list[str]:
        declared = ConfigParser(delimiters="=")
        declared.read_string(self.files.get(f"{self.dist_info}/entry_points.txt", b"").decode())
        return list(declared["console_scripts"]) if declared.has_section("console_scripts") else []


def uv(*arguments: str | Path) -> str:
    """Run uv in the workspace and return what it printed; its complaint ends the script."""
    command = [os.environ.get("UV", "uv"), *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if result.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{result.stderr}")
    return result.stdout


def build(folder: Path) -> list[Wheel]:
    """Build the sdist of every package into `folder`, and from each its wheel."""
    uv("build", "--all-packages", "--out-dir", folder)
    wheels = []
    for source in sorted((ROOT / "packages").iterdir()):
        (path,) = folder.glob(f"{source.name.replace('-', '_')}-*.whl")
        wheels.append(Wheel(path, source))
    return wheels


def source_files(package: Path) -> set[str]:
    """Files under src/, as the wheel should name them; links are followed."""
    found = set()
    for folder, folders, names in os.walk(package / "src", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        here = Path(folder).relative_to(package / "src")
        found |= {(here / name).as_posix() for name in names if name != "BUILD"}
    return found


def check_contents(wheel: Wheel) -> Iterator[str]:
    """Problems with the files of a wheel."""
    expected = source_files(wheel.source)
    found = {name for name in wheel.files if not name.startswith(wheel.dist_info)}
    if missing := expected - found:
        yield f"lacks {', '.join(sorted(missing))}"
    if foreign := found - expected:
        yield f"holds what is not under src/: {', '.join(sorted(foreign))}"
    if f"{wheel.module}/py.typed" not in wheel.files:
        yield "is not marked as typed: add py.typed"
    if wheel.files.get(f"{wheel.dist_info}/licenses/LICENSE") != (ROOT / "LICENSE").read_bytes():
        yield "holds no LICENSE, or not the workspace's"
    if wheel.name == "specforge-launch" and not any(PurePosixPath(n).match("recipes/*.yaml") for n in found):
        yield "ships no recipe"


def run_time_imports(node: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that a syntax tree imports, those under `if TYPE_CHECKING:` left out."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children = iter(node.orelse)
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.partition(".")[0]
    for child in children:
        yield from run_time_imports(child)


def imported_modules(wheel: Wheel) -> dict[str, str]:
    """Third-party and sibling modules that a wheel imports, each with one file that does."""
    found: dict[str, str] = {}
    for name, content in wheel.files.items():
        if name.endswith(".py"):
            found |= dict.fromkeys(run_time_imports(ast.parse(content)), name)
    known = sys.stdlib_module_names | {wheel.module}
    return {module: name for module, name in found.items() if module not in known}


def providers(module: str) -> set[str]:
    """Distributions that may provide `module`."""
    installed = metadata.packages_distributions().get(module, [module])
    return DISTRIBUTIONS.get(module, {canonicalize_name(name) for name in installed})


def check_requirements(wheel: Wheel, versions: dict[str, str]) -> Iterator[str]:
    """Problems with what a wheel declares; `versions` holds those of the packages of this workspace."""
    declared = wheel.required(extra=False) | wheel.required(extra=True)
    for module, name in imported_modules(wheel).items():
        if not providers(module) & declared:
            yield f"{name} imports {module}: declare {' or '.join(sorted(providers(module)))}"
    for requirement in wheel.requirements:
        if requirement.name in versions and str(requirement.specifier) != f"=={versions[requirement.name]}":
            yield f"requires {requirement}: pin it =={versions[requirement.name]}"


def closure(name: str) -> dict[str, metadata.Distribution]:
    """The installed distribution `name` and all that it requires, by name.

    Extras are followed whichever they are: CUDA's libraries are the extras of one distribution.
    """
    found: dict[str, metadata.Distribution] = {}
    waiting = [name]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in found:
            # A requirement of another platform, or of an extra that was not chosen, is not installed.
            for distribution in metadata.distributions(name=name):
                found[name] = distribution
                waiting += [Requirement(line).name for line in distribution.requires or []]
    return found


def link_torch(folder: Path) -> None:
    """Link torch, and all that it requires, from the running environment into `folder`."""
    for distribution in closure("torch").values():
        for top in {path.parts[0] for path in distribution.files or []} - {"..", "__pycache__"}:
            link = folder / top
            if not link.is_symlink():
                link.symlink_to(str(distribution.locate_file(top)))


def with_siblings(wheel: Wheel, wheels: dict[str, Wheel]) -> set[str]:
    """Names of `wheel` and of the packages of this workspace that it requires, directly or not."""
    direct = wheel.required(extra=False) & wheels.keys()
    return {wheel.name}.union(*(with_siblings(wheels[name], wheels) for name in direct))


def install(wheel: Wheel, wheels: dict[str, Wheel], work: Path) -> Path:
    """Make a virtual environment with `wheel` and what it requires alone; returns its bin folder."""
    environment = work / wheel.name
    uv("venv", "--quiet", "--python", sys.executable, environment)
    ours = [wheels[name] for name in with_siblings(wheel, wheels)]
    limits = ["--constraints", work / "constraints.txt", "--excludes", work / "excludes.txt"]
    python = environment / "bin/python"
    uv("pip", "install", "--quiet", "--python", python, *limits, *(one.path for one in ours))
    if any("torch" in one.required(extra=False) for one in ours):
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "workspace_torch.pth").write_text(f"{work / 'torch'}\n")
    return environment / "bin"


def attempt(*command: str | Path) -> str | None:
    """Run `command` outside the workspace; what it printed if it failed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd="/", env=variables, text=True, capture_output=True, timeout=LIMIT_S)
    return (result.stderr or result.stdout) if result.returncode else None


def check_imports(wheel: Wheel, binaries: Path) -> Iterator[str]:
    """Problems with the modules and commands of an installed wheel."""
    required = wheel.required(extra=False)
    optional = [module for module in imported_modules(wheel) if not providers(module) & required]
    modules = [
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in sorted(wheel.files)
        if name.endswith(".py") and not name.endswith("__main__.py")
    ]
    if error := attempt(binaries / "python", "-I", "-c", IMPORT_MODULES, ",".join(optional), *modules):
        yield f"does not import alone:\n{error}"
    for command in wheel.commands:
        if error := attempt(binaries / command, "--help"):
            yield f"{command} --help fails:\n{error}"


def check_light(binaries: Path) -> Iterator[str]:
    """Problems with how specforge-config imports. CPU seconds count: the machine may be busy."""
    command = [binaries / "python", "-I", "-c", TIME_IMPORT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # compiles the modules
    seconds, torch = subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE).stdout.split()
    print(f"specforge-config imports in {float(seconds):.2f} s")
    if torch == "True":
        yield "imports torch"
    if float(seconds) >= IMPORT_LIMIT_S:
        yield f"imports in {seconds} s: required are less than {IMPORT_LIMIT_S} s"


def check_patching(binaries: Path, work: Path) -> Iterator[str]:
    """Problems with applying the patches that lie in the wheel of specforge-capture."""
    for version in supported():
        site = work / "sglang" / version
        make_site(version, site)
        if error := attempt(binaries / "specforge-capture", "patch", "apply", "--site", site):
            yield f"the patches of SGLang {version} cannot be applied:\n{error}"


def check_pants(wheel: Wheel, dist: Path) -> Iterator[str]:
    """Differences between what Pants packaged into `dist` and what uv built."""
    path = dist / wheel.path.name
    sdist = f"{wheel.module}-{wheel.version}.tar.gz"
    if not path.exists() or not (dist / sdist).exists():
        yield f"Pants packaged no {path.name} or no {sdist}"
        return
    theirs = Wheel(path, wheel.source)
    if differing := {name for name, _ in theirs.files.items() ^ wheel.files.items()}:
        yield f"Pants' wheel differs in {', '.join(sorted(differing))}"
    with tarfile.open(dist / sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {f"src/{name}" for name in source_files(wheel.source)}
    needed |= {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md"}
    if missing := needed - names:
        yield f"Pants' sdist lacks {', '.join(sorted(missing))}"


def check(wheel: Wheel, wheels: dict[str, Wheel], work: Path, dist: Path | None) -> list[str]:
    """All problems of one wheel, each a line or more that starts with its name."""
    start = time.perf_counter()
    problems = [*check_contents(wheel), *check_requirements(wheel, {n: w.version for n, w in wheels.items()})]
    if dist:
        problems += check_pants(wheel, dist)
    binaries = install(wheel, wheels, work)
    problems += check_imports(wheel, binaries)
    if wheel.name == "specforge-config":
        problems += check_light(binaries)
    if wheel.name == "specforge-capture":
        problems += check_patching(binaries, work)
    print(f"{wheel.name}: {len(wheel.files)} files, {time.perf_counter() - start:.0f} s")
    return [f"{wheel.name}: {problem}" for problem in problems]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pants", type=Path, metavar="DIST", help="the folder that Pants packaged into")
    dist = parser.parse_args().pants

    with tempfile.TemporaryDirectory(prefix="wheels-") as folder:
        work = Path(folder)
        (work / "torch").mkdir()
        link_torch(work / "torch")
        (work / "excludes.txt").write_text("torch\n")
        locked = uv("export", "--frozen", "--no-hashes", "--no-emit-workspace", "--quiet")
        (work / "constraints.txt").write_text(locked)
        wheels = {wheel.name: wheel for wheel in build(work / "built")}
        with ThreadPoolExecutor(2) as pool:
            results = pool.map(lambda wheel: check(wheel, wheels, work, dist), wheels.values())
            problems = [problem for result in results for problem in result]
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
