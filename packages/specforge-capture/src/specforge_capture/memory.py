"""Memory that ran out while a target worked: the error says which settings to lower."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

_SAID_OTHERWISE = ("can't allocate memory", "Not enough memory")
"""How torch on a CPU and SGLang say it, in plain RuntimeErrors."""


@contextmanager
def naming_budgets(what: str, settings: str) -> Generator[None]:
    """Add a note to an error for lack of memory in the block.

    Args:
        what: what was done.
        settings: which settings to lower.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one of the latter
        lacking = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if lacking or any(text in str(error) for text in _SAID_OTHERWISE):
            error.add_note(f"out of memory while {what}: {settings}")
        raise
