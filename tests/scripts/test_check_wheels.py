"""The wheel check finds what it is for."""

import ast
import importlib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("check_wheels")


def write_wheel(folder: Path, files: dict[str, str], requires: list[str]) -> Path:
    path = folder / "specforge_demo-1.0.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.4\nName: specforge-demo\nVersion: 1.0.0\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, "specforge_demo-1.0.0.dist-info/METADATA": metadata}.items():
            archive.writestr(name, text)
    return path


def test_imports_for_checkers_do_not_count(wheels: ModuleType) -> None:
    source = """
import os.path
from .sibling import x
from yaml.nodes import Node
if TYPE_CHECKING:
    import torch
else:
    import numpy
def late():
    import rich
"""
    assert set(wheels.run_time_imports(ast.parse(source))) == {"os", "yaml", "numpy", "rich"}


def test_undeclared_imports_and_loose_siblings_are_named(wheels: ModuleType, tmp_path: Path) -> None:
    code = "import json, yaml, mooncake, triton, numpy, specforge_config"
    requires = [
        "torch>=2",
        "mooncake-transfer-engine>=0.3; extra == 'mooncake'",
        "specforge-config>=1",
        "numpy",
    ]
    path = write_wheel(tmp_path, {"specforge_demo/__init__.py": code}, requires)
    wheel = wheels.Wheel(path, tmp_path / "specforge-demo")
    assert wheel.required(extra=True) == {"mooncake-transfer-engine"}
    assert list(wheels.check_requirements(wheel, {"specforge-config": "1.0.0"})) == [
        "specforge_demo/__init__.py imports yaml: declare pyyaml",
        "requires specforge-config>=1: pin it ==1.0.0",
    ]


def test_the_wheel_holds_what_lies_under_src(wheels: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "specforge-demo"
    (package / "src/specforge_demo").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    for name in ("src/specforge_demo/__init__.py", "src/specforge_demo/BUILD", "../recipes/one.yaml"):
        (package / name).touch()
    (package / "src/specforge_demo/recipes").symlink_to("../../../recipes")
    path = write_wheel(tmp_path, {"specforge_demo/__init__.py": "", "other/__init__.py": ""}, [])
    found = list(wheels.check_contents(wheels.Wheel(path, package)))
    assert found == [
        "lacks specforge_demo/recipes/one.yaml",
        "holds what is not under src/: other/__init__.py",
        "is not marked as typed: add py.typed",
        "holds no LICENSE, or not the workspace's",
    ]
