"""Where compiled kernels are kept."""

import os
from pathlib import Path

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Variable of a compile cache -> its folder in `compile_cache()`."""


def compile_cache() -> Path:
    """The user's folder of compiled kernels: `$XDG_CACHE_HOME/specforge`, by default `~/.cache/specforge`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specforge"


def keep_compiled() -> None:
    """Have Inductor and Triton keep what they compile in `compile_cache()`, so that the next run starts warm.

    Their own default is the temporary folder. A variable that the user has set stays as it is.
    """
    for variable, folder in CACHES.items():
        os.environ.setdefault(variable, str(compile_cache() / folder))
