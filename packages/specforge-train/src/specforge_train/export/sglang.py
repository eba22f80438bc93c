"""A draft as SGLang loads it: a folder of `config.json` and `model.safetensors`.

The folder appears whole or not at all. It holds exactly the draft's parameters, under their own names;
embedding and head stay with the target.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specforge_train.methods.base import DraftShape, Method
from specforge_train.registry import get_method, method_of_architecture

WEIGHTS = "model.safetensors"


def export_sglang(
    state: Mapping[str, Tensor],
    shape: DraftShape[Any],
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a draft to `folder`, replacing an older export there.

    Args:
        state: the model's whole state, name -> tensor of any float type, on any device.
        shape: the draft's sizes.
        folder: where to write.
        dtype: element type of the written weights.

    Raises:
        ValueError: if names or shapes of `state` are not the model's, or `folder` holds something else.
    """
    method = get_method(shape.config.method)
    found = {name: tuple(value.shape) for name, value in state.items()}
    _require_equal(_expected(method, shape), found, "the state")
    path = Path(folder).absolute()
    if path.exists() and not (path / "config.json").is_file() and any(path.iterdir()):
        raise ValueError(
            f"{path} holds something other than an exported draft: choose another folder for the export"
        )
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in state.items()}
    save_file(weights, staged / WEIGHTS, metadata={"format": "pt"})
    config = method.served_config(shape, str(dtype).removeprefix("torch."))
    (staged / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in staged.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        path.rename(replaced)
    staged.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    return path


def check_export(folder: str | Path) -> DraftShape[Any]:
    """Check that an exported draft is complete, without reading its weights; its sizes.

    Raises:
        ValueError: listing missing, unexpected and misshapen tensors, or missing fields of `config.json`.
    """
    path = Path(folder)
    if not (path / "config.json").is_file() or not (path / WEIGHTS).is_file():
        raise ValueError(f"no exported draft in {path}: required are config.json and {WEIGHTS}")
    config = json.loads((path / "config.json").read_text())
    method = method_of_architecture(config.get("architectures") or [])
    shape = method.served_shape(config)
    with safe_open(path / WEIGHTS, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    _require_equal(_expected(method, shape), found, str(path / WEIGHTS))
    return shape


def load_exported(folder: str | Path) -> tuple[DraftShape[Any], dict[str, Tensor]]:
    """Sizes and state (name -> tensor on the host, as written) of an exported draft.

    Raises:
        ValueError: as `check_export`.
    """
    shape = check_export(folder)
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
        return shape, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _expected(method: Method, shape: DraftShape[Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = method.build(shape)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _require_equal(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], where: str
) -> None:
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not expected" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} is {list(found[name])}, required {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if problems:
        raise ValueError(
            f"{where} is not the draft that its configuration describes:\n  " + "\n  ".join(problems)
        )
