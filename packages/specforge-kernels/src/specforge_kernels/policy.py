"""Which kernel runs, and why: chosen once from device, dtype and shapes; `specforge-kernels status` prints
it.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

ATTENTION_BACKENDS = ("triton", "flex", "flex-flash", "sdpa", "reference")
LAYER_BACKENDS = ("triton", "reference")
TILE_ROWS = 128
"""Rows of our attention kernel's tile: (slot, query head) pairs of whole blocks."""
LARGEST_HIDDEN = 16384
"""Columns that a program of the fused norm holds at once."""


@dataclass(frozen=True)
class Choice:
    """An implementation's name, as the kernels' `backend` takes it, and the reason it was chosen."""

    name: str
    reason: str


_forced: Choice | None = None


@contextmanager
def forced(name: str) -> Generator[None]:
    """Inside, every operation runs by its implementation `triton` or `reference`, whatever this file says: to
    compare the two. It holds for all threads; a backward keeps to the choice of its forward.

    Raises:
        ValueError: another name.
    """
    global _forced
    if name not in LAYER_BACKENDS:
        raise ValueError(f"cannot force {name!r}: choose one of {', '.join(LAYER_BACKENDS)}")
    before, _forced = _forced, Choice(name, "forced")
    try:
        yield
    finally:
        _forced = before


@cache
def triton_unsupported_reason(device: torch.device) -> str | None:
    """Why Triton kernels cannot run here, or None."""
    if device.type != "cuda":
        return f"Triton kernels need CUDA, the device is {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return (
            f"bfloat16 products need compute capability 8.0, the device has {capability[0]}.{capability[1]}"
        )
    return None


def attention_unsupported_reason(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, block: int
) -> str | None:
    """Why our own attention kernel cannot run here, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes 16-bit floats, found {dtype}"
    if head_dim not in (16, 32, 64, 128):
        return f"it takes head dimensions 16, 32, 64 and 128, found {head_dim}"
    if block * group > TILE_ROWS:
        return f"a block of {block} slots × {group} grouped heads exceeds its tile of {TILE_ROWS} rows"
    return triton_unsupported_reason(device)


def layer_unsupported_reason(
    device: torch.device, dtype: torch.dtype, hidden: int, head_dim: int
) -> str | None:
    """Why the fused layer cannot run here, or None."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in float32, found {dtype}"
    if head_dim not in (16, 32, 64, 128, 256):
        return f"it takes head dimensions 16, 32, 64, 128 and 256, found {head_dim}"
    if hidden > LARGEST_HIDDEN:
        return f"a row of {hidden} does not fit a program, which takes {LARGEST_HIDDEN}"
    return triton_unsupported_reason(device)


def flex_unsupported_reason(device: torch.device, head_dim: int) -> str | None:
    """Why FlexAttention's Triton kernels cannot run here, or None."""
    if head_dim < 16:
        return f"FlexAttention takes head dimensions from 16, found {head_dim}"
    return triton_unsupported_reason(device)


@cache
def flash_unsupported_reason(device: torch.device) -> str | None:
    """Why FlexAttention's FLASH kernels (CuTe) cannot run here, or None."""
    if device.type != "cuda":
        return f"FLASH needs CUDA, the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 10:
        return f"FLASH pays on Blackwell (compute capability 10), the device has {major}.{minor}"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "FLASH needs the package flash-attn-4 (flash_attn.cute), which is not installed"
    return None


def choose_attention(
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    group: int = 4,
    block: int = 7,
) -> Choice:
    """The implementation of `anchored_attention`; `group` is the query heads of a key head.

    Blackwell takes FlexAttention's FLASH kernels where they are installed. Elsewhere our own kernel, then
    FlexAttention's Triton kernels, then `scaled_dot_product_attention`.
    """
    if _forced:
        return _forced
    if device.type == "cpu":
        return Choice("sdpa", "a CPU: scaled_dot_product_attention over tiles of blocks")
    flash = flash_unsupported_reason(device)
    if flash is None:
        return Choice("flex-flash", "Blackwell with flash-attn-4: FlexAttention's FLASH kernels")
    own = attention_unsupported_reason(device, dtype, head_dim, group, block)
    if own is None:
        return Choice("triton", f"our kernel, which shares each key among grouped heads and blocks ({flash})")
    flex = flex_unsupported_reason(device, head_dim)
    if flex is None:
        return Choice("flex", f"FlexAttention's Triton kernels (our kernel: {own}; {flash})")
    return Choice("sdpa", f"scaled_dot_product_attention over tiles of blocks ({flex})")


def choose_objective(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """The implementation of `dspark_objective`."""
    if _forced:
        return _forced
    if dtype not in (torch.bfloat16, torch.float32):
        return Choice("reference", f"plain torch in chunks of slots: the fused kernels take no {dtype}")
    reason = triton_unsupported_reason(device)
    if reason is None:
        return Choice(
            "triton", "fused kernels: one pass over the head forward, one backward, both in forward"
        )
    return Choice("reference", f"plain torch in chunks of slots ({reason})")


def choose_layer(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, hidden: int = 4096, head_dim: int = 128
) -> Choice:
    """The implementation of `draft_layer`."""
    if _forced:
        return _forced
    reason = layer_unsupported_reason(device, dtype, hidden, head_dim)
    if reason is None:
        return Choice(
            "triton", "fused norms, rotary and SwiGLU around plain products, compiled once for all lengths"
        )
    return Choice("reference", f"plain torch ({reason})")
