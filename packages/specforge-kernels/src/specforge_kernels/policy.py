"""Which kernel runs, and why: chosen once from device, dtype and shapes; printed by `specforge-kernels
status`.
"""

from dataclasses import dataclass
from functools import cache

import torch

from .anchored_attention import flex


@dataclass(frozen=True)
class Choice:
    """An implementation's name, as the kernels' `backend` takes it, and the reason it was chosen."""

    name: str
    reason: str


@cache
def choose_attention(device: torch.device, head_dim: int = 128) -> Choice:
    """The implementation of `anchored_attention` for a device.

    Hopper and older run FlexAttention's Triton kernels. Blackwell runs its FLASH kernels where they are
    installed.
    """
    if device.type == "cpu":
        return Choice("sdpa", "a CPU: scaled_dot_product_attention over tiles of blocks")
    flash = flex.flash_unsupported_reason(device, head_dim)
    if flash is None:
        return Choice("flex-flash", "Blackwell with flash-attn-4: FlexAttention's FLASH kernels")
    triton = flex.unsupported_reason(device, head_dim)
    if triton is None:
        return Choice("flex", f"FlexAttention's Triton kernels ({flash})")
    return Choice("sdpa", f"scaled_dot_product_attention over tiles of blocks ({triton})")


@cache
def choose_objective(device: torch.device) -> Choice:
    """The implementation of `dspark_objective` for a device."""
    return Choice("reference", f"plain torch in chunks of slots, on {device.type}: the only implementation")
