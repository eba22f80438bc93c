"""A draft's weights without the run around them, for a warm start and for export."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from specforge_train.checkpoint import META, find_damage, newest_checkpoint
from specforge_train.parallel import set_full

MODEL = "model."


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a draft's whole state onto the host. Needs no process group.

    Args:
        path: a checkpoint, a run's folder (its newest whole checkpoint is read), or an exported draft.

    Returns:
        parameter name -> tensor, float32 from checkpoints, as exported otherwise.

    Raises:
        ValueError: if there is nothing of the kind, or the checkpoint is not whole.
    """
    if (path / META).is_file():
        if damage := find_damage(path):
            raise ValueError(f"the checkpoint {path} is not whole: {damage}")
        return _read_checkpoint(path)
    if newest := newest_checkpoint(path):
        return _read_checkpoint(newest)
    if (path / "config.json").is_file():
        from specforge_train.export.folder import load_exported

        return dict(load_exported(path)[1])
    raise ValueError(
        f"{path} is neither a checkpoint, nor the folder of a run with one, nor an exported draft with "
        "config.json"
    )


def warm_start(draft: nn.Module, path: Path) -> None:
    """Set the weights of a draft, sharded or not, from `draft.init_from`.

    Raises:
        ValueError: naming tensors that are missing, left over or of another shape.
    """
    found, wanted = read_weights(path), draft.state_dict()
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [
        f"{name} is {tuple(found[name].shape)}, required {tuple(wanted[name].shape)}"
        for name in wanted.keys() & found.keys()
        if found[name].shape != wanted[name].shape
    ]
    if missing or extra or shapes:
        raise ValueError(
            f"draft.init_from: {path} does not fit this draft: missing {missing}, left over {extra}, "
            f"shapes {sorted(shapes)}; set the sizes under draft to those of the weights"
        )
    for name, parameter in wanted.items():
        set_full(parameter, found[name])


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    reader = dcp.FileSystemReader(path)
    stored = {
        name: item
        for name, item in reader.read_metadata().state_dict_metadata.items()
        if name.startswith(MODEL) and isinstance(item, TensorStorageMetadata)
    }
    state = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in stored.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is what is wanted
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items()}
