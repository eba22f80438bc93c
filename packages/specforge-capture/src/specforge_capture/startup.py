"""What a start spends its time on."""

import time
from collections.abc import Generator
from contextlib import contextmanager


class Startup:
    """Seconds by part, in the order of the parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        """Time the block."""
        began = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - began
