"""Compiler settings that training needs."""

import torch._inductor.config as inductor_config


def keep_aten_gemms() -> str:
    """Keep ATen among Inductor's GEMM candidates, and return the list.

    With variable lengths every Triton candidate of a product can be rejected for some shape; without ATen to
    fall back on, Inductor stops with NoValidChoicesError. Call before the first compilation.
    """
    candidates = [name for name in inductor_config.max_autotune_gemm_backends.split(",") if name]
    if "ATEN" not in candidates:
        inductor_config.max_autotune_gemm_backends = ",".join(["ATEN", *candidates])
    return inductor_config.max_autotune_gemm_backends
