"""The locks of this workspace name nothing of a machine."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("lock")


def test_the_lock_names_the_public_index_alone(lock: ModuleType) -> None:
    assert lock.foreign_sources((ROOT / "uv.lock").read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        'source = { registry = "/home/me/wheels" }',
        'source = { registry = "https://mirror.example/simple" }',
        'sdist = { url = "file:///home/me/a.tar.gz" }',
        'wheels = [{ path = "a-1-py3-none-any.whl" }]',
    ],
)
def test_a_place_of_a_machine_is_found(lock: ModuleType, line: str) -> None:
    text = f'source = {{ registry = "{lock.INDEX}" }}\nsource = {{ editable = "packages/a" }}\n{line}\n'
    (found,) = lock.foreign_sources(text)
    assert found in line
