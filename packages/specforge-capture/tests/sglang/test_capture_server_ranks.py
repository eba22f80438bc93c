"""A real SGLang server of two tensor-parallel ranks that cuts prompts into chunks, with Mooncake."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_capture.stores.mooncake import load_library
from specforge_config.store import MooncakeStore

CHUNK = 64
LENGTHS = (1, 700, 63, 64, 65, 300, 17, 129)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def mooncake(folder: Path) -> Iterator[MooncakeStore]:
    try:
        load_library()
    except ValueError as error:
        raise pytest.skip.Exception(str(error)) from error
    port, metrics = free_ports(2)
    settings = MasterSettings(port=port, metrics_port=metrics)
    with running_master(settings, folder / "master.log"):
        yield MooncakeStore(master=settings.address, capacity_bytes=64 << 20)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], folder: Path, mooncake: MooncakeStore) -> Iterator[Any]:
    chunks = ("--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")
    # A ring of a few rows and less waiting than one chunk: prefills wait for the writer all the time.
    small = ("--spec-capture-ring-bytes", str(1 << 16), "--spec-capture-pending-bytes", str(1 << 15))
    with serve(folder, mooncake, *chunks, *small, tp_size=2) as running:
        yield running


def test_chunks_on_two_ranks_make_whole_captures(server: Any, reference: Callable[..., torch.Tensor]) -> None:
    draws = np.random.default_rng(0)
    shared = draws.integers(4, 1024, 40).tolist()
    own = [draws.integers(4, 1024, length).tolist() for length in LENGTHS * 2]
    prompts = own[: len(LENGTHS)] + [shared + tokens for tokens in own[len(LENGTHS) :]]
    with ThreadPoolExecutor(8) as pool:
        keys = [f"ranks/0-{index}-0" for index in range(len(prompts))]
        found = list(pool.map(server.capture, keys, prompts))
    for rows, tokens in zip(found, prompts, strict=True):
        # float32 sums in another order, over ranks and chunks too, of states up to some tens.
        torch.testing.assert_close(rows, reference(tokens), atol=1e-5, rtol=1e-5)
    assert server.store.remove_prefix("ranks/") > len(prompts)
