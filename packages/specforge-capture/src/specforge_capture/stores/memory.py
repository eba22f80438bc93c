"""Host memory as stores see it: tensors as runs of bytes."""

import torch
from torch import Tensor


def host_bytes(tensor: Tensor) -> Tensor:
    """A tensor's memory as bytes [n] uint8, without a copy.

    Raises:
        ValueError: for one that is not contiguous, not on the host, or empty (Mooncake keeps no empty
            object).
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.numel():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} on {tensor.device}; "
            "required: a contiguous one on the host with at least one element"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def host_view(tensor: Tensor) -> memoryview:
    """A tensor's memory as a memory view of bytes, for files and checksums.

    Raises:
        ValueError: as `host_bytes`.
    """
    return memoryview(host_bytes(tensor).numpy())
