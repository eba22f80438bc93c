"""An exported draft on disk: a folder of `config.json` and safetensors, written whole and checked before use.

The check is there because engines do not make it: SGLang skips backbone tensors whose names it does not know
and leaves parameters that no tensor fills as they were allocated, and a draft that is wrong drafts badly
without any error. What passes holds exactly the parameters that its configuration describes, in the
configuration's type and finite, with no field that an engine would read differently.

All weights lie in `model.safetensors`, or in shards that `model.safetensors.index.json` lists.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specforge_train.methods.base import DraftShape, Method
from specforge_train.registry import get_method, method_of_config

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""safetensors' names of the types that engines load -> the configuration's."""


def write_export(
    state: Mapping[str, Tensor],
    shape: DraftShape[Any],
    config: Mapping[str, Any],
    folder: str | Path,
    dtype: torch.dtype,
) -> Path:
    """Write a draft to `folder`, replacing an older export there. It appears whole or not at all.

    Args:
        state: the model's whole state, name -> tensor of any float type, on any device.
        shape: the draft's sizes.
        config: what `config.json` gets.
        folder: where to write.
        dtype: element type of the written weights.

    Raises:
        ValueError: if names or shapes of `state` are not the model's, if a value is not finite in `dtype`, or
            `folder` holds something else.
    """
    found = {name: tuple(value.shape) for name, value in state.items()}
    _refuse(_shape_faults(_expected(get_method(shape.config.method), shape), found), "the state")
    path = Path(folder).absolute()
    if path.exists() and not (path / CONFIG).is_file() and any(path.iterdir()):
        raise ValueError(
            f"{path} holds something other than an exported draft: choose another folder for the export"
        )
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in state.items()}
    _refuse(_value_faults(weights.items()), "the state")
    staged = path.with_name(f".{path.name}.{os.getpid()}.new")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    save_file(weights, staged / WEIGHTS, metadata={"format": "pt"})
    (staged / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
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
    """Check an exported draft, of either layout, as an engine would have to; its sizes.

    Weights are read a tensor at a time.

    Raises:
        ValueError: for files that are missing, cut short or beside the draft; listing tensors that are
            missing, unexpected, misshapen, of another type than `config.json` says or not finite; listing
            fields that are missing, contradict each other or would be read differently by an engine.
    """
    exported = _read(Path(folder))
    config, where = exported.config, str(folder)
    _refuse(exported.method.served_faults(config), f"{where}/{CONFIG}")
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    faults = [
        f"{name} is {_DTYPES.get(stored.dtype, stored.dtype)}, required {dtype}, the dtype of {CONFIG}"
        for name, stored in sorted(exported.tensors.items())
        if _DTYPES.get(stored.dtype) != dtype
    ]
    _refuse([*faults, *_value_faults(exported.values())], where)
    return exported.shape


def load_exported(folder: str | Path) -> tuple[DraftShape[Any], dict[str, Tensor]]:
    """Sizes and state (name -> tensor on the host, as written) of an exported draft of either layout.

    Raises:
        ValueError: for files, fields or tensors that are missing, unexpected or misshapen, and values that
            are not finite.
    """
    exported = _read(Path(folder))
    state = dict(exported.values())
    _refuse(_value_faults(state.items()), str(folder))
    return exported.shape, state


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Exported:
    """A folder whose tensors have the names and shapes of its configuration."""

    config: dict[str, Any]
    method: Method
    shape: DraftShape[Any]
    tensors: dict[str, _Stored]

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, one in memory at a time."""
        for file in sorted({stored.file for stored in self.tensors.values()}):
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    yield name, handle.get_tensor(name)


def _read(path: Path) -> _Exported:
    if not (path / CONFIG).is_file():
        raise ValueError(f"no exported draft in {path}: required are {CONFIG} and {WEIGHTS}")
    config = _read_json(path / CONFIG)
    method = method_of_config(config)
    shape = method.served_shape(config)
    tensors = _stored_tensors(path)
    found = {name: stored.shape for name, stored in tensors.items()}
    _refuse(_shape_faults(_expected(method, shape), found), str(path))
    return _Exported(config, method, shape, tensors)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; export the draft again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, required an object; export again")
    return content


def _stored_tensors(path: Path) -> dict[str, _Stored]:
    """What the folder's weight files say they hold.

    An engine takes every `*.safetensors` of a folder for the draft's, so that no other may lie there.
    """
    there = {file.name for file in path.glob("*.safetensors")}
    index = _read_json(path / INDEX).get("weight_map", {}) if (path / INDEX).is_file() else None
    named = {WEIGHTS} if index is None else set(index.values())
    faults = [f"{name} is missing" for name in sorted(named - there)]
    faults += [f"{name} is not expected: an engine would load it too" for name in sorted(there - named)]
    _refuse(faults, f"the weight files of {path}")
    tensors: dict[str, _Stored] = {}
    for name in sorted(named):
        tensors |= _headers(path / name)
    if index is not None:
        found = {name: stored.file.name for name, stored in tensors.items()}
        faults = [
            f"{name} is in {found.get(name, 'no shard')}, {INDEX} places it in {index.get(name, 'no shard')}"
            for name in sorted(found.keys() | index.keys())
            if found.get(name) != index.get(name)
        ]
        _refuse(faults, str(path))
    return tensors


def _headers(file: Path) -> dict[str, _Stored]:
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
            return {
                name: _Stored(file, tuple(part.get_shape()), part.get_dtype())
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({error}): copy or export the draft again"
        ) from None


def _expected(method: Method, shape: DraftShape[Any]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = method.build(shape)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


def _shape_faults(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    faults = [f"{name} is missing, required {list(expected[name])}" for name in sorted(missing)]
    faults += [f"{name} is {list(found[name])}, required no such tensor" for name in sorted(extra)]
    return faults + [
        f"{name} is {list(found[name])}, required {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]


def _value_faults(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    faults = []
    for name, value in tensors:
        count = value.numel() - int(torch.isfinite(value).sum())
        if count:
            kind = str(value.dtype).removeprefix("torch.")
            faults.append(f"{name} holds {count} NaN or infinite values of {value.numel()} as {kind}")
    return faults


def _refuse(faults: list[str], where: str) -> None:
    if faults:
        raise ValueError(
            f"{where} is not the draft that its configuration describes:\n  " + "\n  ".join(faults)
        )
