"""A patched SGLang 0.5.18, run with its plugins switched off: it captures what the plugin captures."""

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specforge_capture.patching import PATCHES, find_sglang
from specforge_capture.sglang.options import VARIABLE
from specforge_capture.sglang.versions import SUPPORTED
from specforge_config.store import FileStore

LENGTHS = (1, 33, 700, 2, 130)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def overlay(sglang_python: Path, tmp_path: Path) -> Path:
    """A site-packages folder of links to the environment's SGLang; the environment stays as it is."""
    site = next(sglang_python.parents[1].glob("lib/python*/site-packages"))
    for folder in (site / "sglang", *site.glob("sglang-*.dist-info")):
        shutil.copytree(folder, tmp_path / "site" / folder.name, copy_function=os.symlink)
    return tmp_path / "site"


@pytest.fixture
def switched_off(overlay: Path) -> dict[str, str]:
    """Variables under which the overlay is SGLang, and takes no plugin."""
    return {"PYTHONPATH": str(overlay), "SGLANG_PLUGINS": "none"}


def captured(
    serve: Callable[..., AbstractContextManager[Any]], folder: Path, **how: Any
) -> list[torch.Tensor]:
    """Features of one prompt of each length, from a server of its own."""
    folder.mkdir()
    store = FileStore(kind="files", folder=str(folder / "features"), capacity_bytes=32 << 20)
    with serve(folder, store, **how) as server:
        return [server.capture(f"patched/0-{length}-0", prompt(length)) for length in LENGTHS]


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(4, 1024, length).tolist()


def test_versions_share_the_patch() -> None:
    """Then what is shown of one version's holds of each: their hooked functions are in test_hooks.py."""
    texts = {(PATCHES / version / "0001-spec-capture.patch").read_text() for version in SUPPORTED}
    assert len(texts) == 1
    assert f'"{VARIABLE}" in os.environ' in texts.pop()


def test_captures_the_same_where_plugins_are_switched_off(
    serve: Callable[..., AbstractContextManager[Any]],
    reference: Callable[[list[int]], torch.Tensor],
    overlay: Path,
    switched_off: dict[str, str],
    tmp_path: Path,
) -> None:
    plugin = captured(serve, tmp_path / "plugin")
    changed = find_sglang(overlay).bring("patched")
    assert {path.relative_to(overlay).parts[0] for path in changed} == {"sglang"}
    assert not any(path.is_symlink() for path in changed)
    patched = captured(serve, tmp_path / "patched", variables=switched_off)
    for length, found, same in zip(LENGTHS, patched, plugin, strict=True):
        assert torch.equal(found, same)
        # float32 sums in another order, of states up to some tens: a few units in the last place.
        torch.testing.assert_close(found, reference(prompt(length)), atol=1e-5, rtol=1e-5)


def test_captures_only_where_it_is_asked_to(
    sglang_python: Path, overlay: Path, switched_off: dict[str, str]
) -> None:
    def options(*given: str) -> str:
        done = subprocess.run(
            [sglang_python, "-m", "sglang.launch_server", *given, "--help"],
            env={**os.environ, **switched_off, "OMP_NUM_THREADS": "1"},
            timeout=300,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-8000:]
        return done.stdout

    assert "--spec-capture-store" not in options("--enable-spec-capture"), "released: plugins are off"
    find_sglang(overlay).bring("patched")
    assert "--spec-capture-store" in options("--enable-spec-capture")
    assert "--spec-capture-store" not in options()
