"""Stands in for the CPU build of SGLang's kernel package, which the index does not have.

It holds what a prefill with `attention_backend=torch_native` calls; any other kernel raises when it is
called.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start: Tensor,
    end: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row, from `start` to `end`."""
    lengths = (end - start).tolist()
    rows = zip(req_pool_indices.tolist(), start.tolist(), out_cache_loc.split(lengths), strict=True)
    for row, first, slots in rows:
        req_to_token[row, first : first + len(slots)] = slots.to(req_to_token.dtype)


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: this environment has no kernels")

    return missing
