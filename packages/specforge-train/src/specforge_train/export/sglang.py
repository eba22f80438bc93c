"""A draft as SGLang loads it.

The folder holds exactly the draft's parameters, under their own names; embedding and head stay with the
target.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_train.export.folder import write_export
from specforge_train.methods.base import DraftShape
from specforge_train.registry import get_method


def export_sglang(
    state: Mapping[str, Tensor],
    shape: DraftShape[Any],
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a draft to `folder` for SGLang; see `write_export`.

    Raises:
        ValueError: as `write_export`.
    """
    config = get_method(shape.config.method).served_config(shape, str(dtype).removeprefix("torch."))
    return write_export(state, shape, config, folder, dtype)
