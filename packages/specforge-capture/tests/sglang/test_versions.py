import ast
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from specforge_capture.sglang.versions import SUPPORTED, Adapter, adapter_module, installed_version


def test_other_versions_are_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"SGLang 0\.5\.9 is installed; required: one of 0\.5\.14, 0\.5\.18, 0\.5\.23"
    ):
        adapter_module("0.5.9")


# Not find_spec: a folder of tests named sglang counts as a package there.
@pytest.mark.skipif(any(metadata.distributions(name="sglang")), reason="SGLang is installed here")
def test_missing_package_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"specforge-capture\[sglang\]"):
        installed_version()


@pytest.mark.parametrize("version", SUPPORTED)
def test_each_version_has_the_whole_interface(version: str) -> None:
    spec = find_spec(adapter_module(version))
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    found = {
        node.name: [argument.arg for argument in node.args.args]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    wanted = {
        name: list(function.__code__.co_varnames[1 : function.__code__.co_argcount])
        for name, function in vars(Adapter).items()
        if callable(function) and not name.startswith("_")
    }
    assert found == wanted
