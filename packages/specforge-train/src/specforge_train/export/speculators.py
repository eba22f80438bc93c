"""A draft as speculators 0.9 loads it: the same tensors as SGLang's layout under another `config.json`, which
names the target that embedding, head and final norm are read from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_train.export.folder import write_export
from specforge_train.methods.base import DraftShape, Verifier
from specforge_train.registry import get_method


def export_speculators(
    state: Mapping[str, Tensor],
    shape: DraftShape[Any],
    folder: str | Path,
    verifier: Verifier,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a draft to `folder` for speculators; see `write_export`.

    Args:
        state: the model's whole state, name -> tensor of any float type, on any device.
        shape: the draft's sizes.
        folder: where to write.
        verifier: the target that the draft is for.
        dtype: element type of the written weights.

    Raises:
        ValueError: as `write_export`, and for a draft that speculators computes differently.
    """
    method = get_method(shape.config.method)
    config = method.speculators_config(shape, str(dtype).removeprefix("torch."), verifier)
    return write_export(state, shape, config, folder, dtype)
