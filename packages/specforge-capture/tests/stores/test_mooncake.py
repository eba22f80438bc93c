"""What is Mooncake's own: pins, leases, lost processes, a lost master. Each wait is bounded."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge_capture.stores import mooncake
from specforge_capture.stores.base import FeatureStore, MissingObject, StoreError, StoreFull
from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_capture.stores.mooncake import Mooncake
from specforge_config.store import MooncakeStore

MIB = 1 << 20
# No torch here, whose import would take most of the test.
HOLDER = """if True:
    import sys
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    store, pinned = MooncakeDistributedStore(), ReplicateConfig()
    pinned.with_hard_pin = True
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 24, 1 << 24, "tcp", "", sys.argv[1]) == 0
    assert store.put("held/0", bytes(range(200)), pinned) == 0
    print("held", flush=True)
    sys.stdin.read()
"""


def test_pinned_objects_survive_pressure_and_expired_leases(
    master: MasterSettings, mooncake_settings: MooncakeStore, opened: Callable[..., Any]
) -> None:
    server: Mooncake = opened(mooncake_settings, contribute=True)
    rank: FeatureStore = opened(mooncake_settings)
    pinned = torch.arange(MIB, dtype=torch.int64)[: MIB // 8]
    found = torch.zeros_like(pinned)
    server.put([("pinned", pinned)])
    rank.get_into([("pinned", found)])  # grants a lease
    time.sleep(2 * master.lease_seconds)
    loose = torch.zeros(MIB, dtype=torch.uint8)
    for i in range(40):  # unpinned ones, which are evicted for each other
        server._store.put_from(f"loose/{i}", loose.data_ptr(), MIB)
        time.sleep(0.01)
    assert server._store.is_exist("loose/0") == 0
    rank.get_into([("pinned", found)])
    assert torch.equal(found, pinned)
    # A put waits until eviction has made room.
    server.put([(f"ours/{i}", loose) for i in range(8)])
    with pytest.raises(StoreFull):
        server.put([(f"more/{i}", loose) for i in range(16)])
    rank.get_into([("pinned", found), *((f"ours/{i}", torch.zeros_like(loose)) for i in range(8))])


def test_objects_of_a_killed_process_are_missing(
    master: MasterSettings, mooncake_settings: MooncakeStore, opened: Callable[..., FeatureStore]
) -> None:
    rank = opened(mooncake_settings)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, mooncake_settings.master],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    found = torch.zeros(200, dtype=torch.uint8)
    rank.get_into([("held/0", found)])
    assert found.tolist() == list(range(200))
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    holder.stdout.close()
    holder.stdin.close()
    began = time.monotonic()
    with pytest.raises(MissingObject, match="'held/0'"):  # the master still believes in it
        rank.get_into([("held/0", found)])
    assert time.monotonic() - began < 20
    rank.remove(["held/0"])
    rank.remove_prefix("held/")
    # Until the master has forgotten it, puts may land in its lost memory.
    url, deadline = f"http://{master.host}:{master.metrics_port}/get_all_segments", time.monotonic() + 20
    while urllib.request.urlopen(url, timeout=5).read().strip() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_killed_master_ends_traffic_with_errors(master: MasterSettings, tmp_path: Path) -> None:
    port, metrics = free_ports(2)
    own = MasterSettings(port=port, metrics_port=metrics)
    settings = MooncakeStore(master=own.address, capacity_bytes=16 * MIB, transfer_timeout_seconds=5)
    ended: dict[str, StoreError] = {}
    busy = threading.Barrier(3)

    def traffic(name: str, store: Mooncake) -> None:
        tensor, rounds = torch.zeros(MIB, dtype=torch.uint8), 0
        try:
            while True:
                if name == "server":
                    store.put([("written", tensor)])
                else:
                    store.get_into([("read", tensor)])
                rounds += 1
                if rounds == 5:
                    busy.wait(30)
        except StoreError as error:
            ended[name] = error

    with running_master(own, tmp_path / "log") as process:
        stores = {
            "server": Mooncake(settings, contribute=True),
            "rank": Mooncake(settings, contribute=False),
        }
        stores["server"].put([("read", torch.zeros(MIB, dtype=torch.uint8))])
        threads = [threading.Thread(target=traffic, args=item, daemon=True) for item in stores.items()]
        for thread in threads:
            thread.start()
        busy.wait(30)
        process.kill()
        began = time.monotonic()
        for thread in threads:
            thread.join(60)
        assert set(ended) == {"server", "rank"}
        assert time.monotonic() - began < 60
    for error in ended.values():
        assert "the master cannot be reached (code -900)" in str(error)
    calls: list[Callable[[], object]] = [
        lambda: stores["rank"].remove(["x"]),
        lambda: stores["rank"].remove_prefix("x"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="the master cannot be reached"):
            call()
    closing = [threading.Thread(target=store.close, daemon=True) for store in stores.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(60)
    assert not any(thread.is_alive() for thread in closing)


def test_a_missing_master_is_told_at_once(mooncake_settings: MooncakeStore) -> None:
    (port,) = free_ports(1)
    settings = mooncake_settings.model_copy(update={"master": f"127.0.0.1:{port}"})
    began = time.monotonic()
    with pytest.raises(StoreError, match=rf"no Mooncake master answers at store\.master 127\.0\.0\.1:{port}"):
        Mooncake(settings, contribute=False)
    assert time.monotonic() - began < 10


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with(error: ImportError) -> Callable[[str], None]:
        def load(name: str) -> None:
            raise error

        return load

    text = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    monkeypatch.setattr(mooncake, "import_module", fails_with(ImportError(text)))
    with pytest.raises(ValueError, match=r"libibverbs\.so\.1: .*apt-get install libibverbs1"):
        mooncake.load_library()
    monkeypatch.setattr(
        mooncake, "import_module", fails_with(ModuleNotFoundError("No module named 'mooncake'"))
    )
    with pytest.raises(ValueError, match=r"pip install 'specforge-capture\[mooncake\]'"):
        mooncake.load_library()
