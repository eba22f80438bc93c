"""Small host arrays to the device, without stopping the host.

A step's integer bookkeeping (anchors, labels, slot ranges) is made on the host. A copy from pageable memory
makes the host wait for the stream, so the arrays travel as one pinned buffer in one asynchronous copy. Each
starts at a multiple of 16 bytes there: Triton compiles a kernel anew for pointers that do not.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNED_WORDS = 4
"""Words of 4 bytes in 16 bytes."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copies of `arrays` (int32 or float32, any shapes) on `device`, in their order and shapes."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return unpack(torch.from_numpy(pack(arrays)).pin_memory().to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One int32 buffer of all arrays' words; what lies between them is undefined."""
    starts = _starts(arrays)
    words = np.empty(starts[-1], np.int32)
    for array, start in zip(arrays, starts, strict=False):
        words[start : start + array.size] = np.ascontiguousarray(array).view(np.int32).reshape(-1)
    return words


def unpack(words: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of the buffer's copy, with the types and shapes of the packed arrays."""
    views = []
    for array, start in zip(arrays, _starts(arrays), strict=False):
        dtype = torch.float32 if array.dtype == np.float32 else torch.int32
        views.append(words[start : start + array.size].view(dtype).view(array.shape))
    return views


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """First word of each array, and the buffer's length."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.size // ALIGNED_WORDS) * ALIGNED_WORDS)
    return starts
