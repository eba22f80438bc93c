"""Every launch of a warm-up runs: through Triton's interpreter, in threads on a GPU."""

import os
import threading

import pytest
import torch

from specforge_kernels.warm_up import WarmUp

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="needs a GPU or TRITON_INTERPRET=1 (test_interpreter.py)",
)
CPU = torch.device("cpu")


def test_launches_run_at_once_and_errors_come_out() -> None:
    both = threading.Barrier(2)
    warm_up = WarmUp([lambda: both.wait(60), lambda: both.wait(60)], CPU)
    warm_up.wait()
    warm_up.wait()

    def fail() -> None:
        raise OSError("no compiler")

    failing = WarmUp([fail], CPU)
    for _ in range(2):
        with pytest.raises(OSError, match="no compiler"):
            failing.wait()
    WarmUp([], CPU).wait()


@needs_triton
def test_launches_of_all_triton_kernels() -> None:
    from specforge_kernels.anchored_attention.triton import warm_up_attention
    from specforge_kernels.draft_layer.triton import warm_up_layer
    from specforge_kernels.dspark_objective.triton import warm_up_objective

    device, dtype = (CPU, torch.float32) if INTERPRETED else (torch.device("cuda"), torch.bfloat16)
    launches = (
        *warm_up_attention(4, 2, 16, 3, None, dtype, device),
        *warm_up_layer(48, 80, 16, dtype, device),
        *warm_up_objective(300, True, dtype, device),
    )
    assert len(launches) == 11
    if INTERPRETED:  # which runs one thread's kernels at a time
        for launch in launches:
            launch()
    else:
        WarmUp(launches, device).wait()
