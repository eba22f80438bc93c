"""What the tests of the trainer share.

This folder goes on the path for its helpers (`rank_processes`, `tiny_training`), which ranks import too.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parent))

if TYPE_CHECKING:
    from specforge_train.parallel import World


@pytest.fixture
def world() -> "Iterator[World]":
    """A world of this process alone."""
    from specforge_config.deployment import TrainerNodes
    from specforge_config.topology import Topology
    from specforge_train.parallel import start_world

    started = start_world(TrainerNodes(device="cpu", cpu_threads=1), Topology(1), "full")
    yield started
    started.close()
