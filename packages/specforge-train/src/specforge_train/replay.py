"""A function of tensors of fixed shapes, recorded once as a CUDA graph and replayed.

A decoding step is hundreds of small kernels, whose launches take the host longer than a small model's
arithmetic takes the device. A replay launches all of them at once.

Only this thread's work is recorded: others, such as those that fetch features, may go on using the device.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[..., tuple[Tensor, ...]]

_WARM_UP = 2
"""Calls before the recording, in which kernels are compiled and libraries make their workspaces."""


@torch.no_grad()
def recorded(function: Function, inputs: tuple[Tensor, ...]) -> Function:
    """What does the same as `function` for inputs of the same shapes.

    Args:
        function: takes tensors on the current CUDA device and returns some, without waiting for the device.
            What it writes elsewhere, it writes at fixed places; it is called more often than asked.
        inputs: of the first call.

    Returns:
        A function whose results are its caller's own.

    Raises:
        RuntimeError: if `function` waits for the device.
    """
    places = tuple(value.clone() for value in inputs)
    own, aside, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    aside.wait_stream(own)
    with torch.cuda.stream(aside):
        for _ in range(_WARM_UP):
            function(*places)
    own.wait_stream(aside)
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = function(*places)
    finally:
        torch.cuda.set_stream(own)  # a recording that fails leaves its own stream in place

    @torch.no_grad()
    def replay(*values: Tensor) -> tuple[Tensor, ...]:
        for place, value in zip(places, values, strict=True):
            place.copy_(value, non_blocking=True)
        graph.replay()
        return tuple(result.clone() for result in results)  # the next replay writes over its own

    return replay
