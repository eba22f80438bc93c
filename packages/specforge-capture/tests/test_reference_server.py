import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specforge_capture.fetch import Fetcher
from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
from specforge_capture.reference_server import ReferenceServer
from specforge_capture.refs import FeatureRef
from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.stores.master import free_ports
from specforge_capture.targets.base import PromptRow
from specforge_capture.targets.hf import HFTarget
from specforge_capture.wire import CaptureClient, ServerDescription
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.store import FileStore

IDS = list(range(10, 50))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FeatureStore]:
    """A file store with room for some samples."""
    store = open_store(FileStore(kind="files", folder=str(tmp_path), capacity_bytes=200_000), contribute=True)
    yield store
    store.close()


@pytest.fixture
def client(target: HFTarget, store: FeatureStore) -> Iterator[CaptureClient]:
    """Speaks to a server over `store`."""
    with ReferenceServer(target, store, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield CaptureClient(f"http://127.0.0.1:{server.server_address[1]}", 60)
        server.shutdown()
        thread.join(10)


@pytest.fixture
def fetch(store: FeatureStore, spec: CaptureSpec) -> Iterator[Callable[[FeatureRef], Tensor]]:
    """Reads a sample's states, all layers side by side and the final one behind them."""
    fetcher = Fetcher(store, spec, torch.device("cpu"), buffer_bytes=1 << 20)

    def read(ref: FeatureRef) -> Tensor:
        hidden = torch.full((ref.rows, 3 * spec.hidden_size), torch.nan)
        last = torch.full((ref.rows, spec.hidden_size), torch.nan)
        fetcher.fetch(ref, hidden, last)
        return torch.cat([hidden, last], dim=1)

    yield read
    fetcher.close()


def captured(target: HFTarget, ids: list[int]) -> Tensor:
    """What the target says of a prompt alone."""
    batch = target.capture([PromptRow("x", np.array(ids, np.int32), np.ones(len(ids), bool))])
    assert batch.last_hidden is not None
    return torch.cat([batch.hidden, batch.last_hidden], dim=1)


def test_it_tells_what_it_captures(client: CaptureClient, spec: CaptureSpec) -> None:
    assert client.describe() == ServerDescription.of(spec)


def test_an_answer_names_features_that_can_be_read_and_are_the_targets_own(
    client: CaptureClient, target: HFTarget, spec: CaptureSpec, fetch: Callable[[FeatureRef], Tensor]
) -> None:
    ref = client.capture("run/0-0-1", "a", IDS, spec_hash(spec))
    assert (ref.key, ref.sample_id, ref.rows) == ("run/0-0-1", "a", len(IDS))
    assert torch.equal(fetch(ref), captured(target, IDS))


def test_requests_at_a_time_do_not_mix(
    client: CaptureClient, target: HFTarget, spec: CaptureSpec, fetch: Callable[[FeatureRef], Tensor]
) -> None:
    prompts = [IDS[: 5 + 4 * i] for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(client.capture, f"run/0-{i}-1", str(i), ids, spec_hash(spec))
            for i, ids in enumerate(prompts)
        ]
    for ids, future in zip(prompts, asked, strict=True):
        assert torch.equal(fetch(future.result()), captured(target, ids))


@pytest.mark.parametrize(
    ("ids", "contract", "message"),
    [
        ([1, 320], None, "holds token 320; required: below 320"),
        ([], None, "input_ids must be a list of token ids"),
        ([1], "0" * 64, "under the contract 000000000000; required: "),
    ],
)
def test_what_never_will_be_captured_is_refused(
    client: CaptureClient, spec: CaptureSpec, ids: list[int], contract: str | None, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        client.capture("run/0-0-1", "a", ids, contract or spec_hash(spec))


def test_a_full_store_fails_that_request_alone(
    client: CaptureClient, store: FeatureStore, spec: CaptureSpec
) -> None:
    store.put([("other", torch.zeros(195_000, dtype=torch.uint8))])
    with pytest.raises(RequestFailed, match="HTTP 500"):
        client.capture("run/0-0-1", "a", IDS, spec_hash(spec))
    store.remove(["other"])
    assert client.capture("run/0-0-2", "a", IDS, spec_hash(spec)).rows == len(IDS)


def test_the_command_serves_until_it_is_asked_to_end(
    qwen3_folder: Path, spec: CaptureSpec, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    store = FileStore(kind="files", folder=str(tmp_path / "store"))
    options = {"spec": spec, "store": store}
    server = subprocess.Popen(
        [sys.executable, "-m", "specforge_capture.cli", "serve", str(qwen3_folder), f"--port={port}"]
        + [f"--{name}={value.model_dump_json()}" for name, value in options.items()]
    )
    try:
        client, deadline = CaptureClient(f"http://127.0.0.1:{port}", 60), time.monotonic() + 240
        while True:
            try:
                client.describe()
                break
            except ServerDown:
                assert server.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert client.capture("run/0-0-1", "a", IDS, spec_hash(spec)).rows == len(IDS)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait(10)
