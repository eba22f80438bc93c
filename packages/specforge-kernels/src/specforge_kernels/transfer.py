"""Small host arrays to the device, without stopping the host.

A step's integer bookkeeping (anchors, labels, slot ranges) is made on the host. A copy from pageable memory
makes the host wait for the stream, so the arrays travel as one pinned buffer in one asynchronous copy.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies of `arrays` (int32 or float32, any shapes) on `device`, in their order and shapes."""
    host = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu":
        return host
    words = torch.cat([tensor.view(torch.int32).reshape(-1) for tensor in host])
    moved = words.pin_memory().to(device, non_blocking=True)
    parts = moved.split([tensor.numel() for tensor in host])
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, host, strict=True)]
