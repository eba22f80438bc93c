"""Compiles a step's Triton kernels at once, in threads, before the first step needs them.

Each call launches kernels on inputs as small as they may be, with the types and constants of the real ones:
that compiles them, builds their launchers and loads them. Kernels are made once for all lengths, so nothing
is left to compile afterwards. Triton lets other threads run while LLVM and ptxas work.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import torch

Launches = Sequence[Callable[[], object]]


class WarmUp:
    """Kernels on their way; no two of the calls may launch the same kernel."""

    def __init__(self, launches: Launches, device: torch.device) -> None:
        """Start all of `launches`, each in a thread of its own, on `device`."""
        self._done: list[Future[object]] = []
        if not launches:
            return
        if device.type == "cuda":
            # The first use of Triton's driver builds it, which two threads would do twice.
            from triton.runtime import driver

            driver.active.get_current_target()

        def run(launch: Callable[[], object]) -> object:
            # A thread starts on the first GPU, whichever the caller is on.
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return launch()

        with_threads = ThreadPoolExecutor(len(launches), thread_name_prefix="warm-up")
        self._done = [with_threads.submit(run, launch) for launch in launches]
        with_threads.shutdown(wait=False)

    def wait(self) -> None:
        """Return when every kernel is ready; raises what a launch raised."""
        while self._done:
            self._done[-1].result()
            self._done.pop()
