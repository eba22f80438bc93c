"""Compiler settings that training needs."""

import os
from pathlib import Path

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable of a compile cache -> its folder in `compile_cache()`."""


def keep_aten_gemms() -> str:
    """Keep ATen among Inductor's GEMM candidates, and return the list.

    With variable lengths every Triton candidate of a product can be rejected for some shape; without ATen to
    fall back on, Inductor stops with NoValidChoicesError. Call before the first compilation.
    """
    import torch._inductor.config as inductor_config  # slow to import, and most runs compile nothing

    candidates = [name for name in inductor_config.max_autotune_gemm_backends.split(",") if name]
    if "ATEN" not in candidates:
        inductor_config.max_autotune_gemm_backends = ",".join(["ATEN", *candidates])
    return inductor_config.max_autotune_gemm_backends


def compile_cache() -> Path:
    """The user's folder of compiled kernels: `$XDG_CACHE_HOME/specforge`, by default `~/.cache/specforge`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specforge"


def keep_compiled() -> None:
    """Have Inductor and Triton keep what they compile in `compile_cache()`, so that the next run starts warm.

    Their own default is the temporary folder. A variable that the user has set stays as it is.
    """
    for variable, folder in CACHES.items():
        os.environ.setdefault(variable, str(compile_cache() / folder))
