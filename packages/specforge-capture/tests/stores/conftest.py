"""Real stores: a folder, and Mooncake with a master of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.stores.master import MasterSettings, free_ports, running_master
from specforge_capture.stores.mooncake import load_library
from specforge_config.store import FileStore, MooncakeStore

StoreSettings = MooncakeStore | FileStore
SMALL = 16 << 20
"""Bytes of a store that fills up soon. Mooncake gives memory in multiples of this."""


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MasterSettings]:
    """A running Mooncake master that forgets leases soon."""
    try:
        load_library()
    except ValueError as error:
        raise pytest.skip.Exception(str(error)) from error
    port, metrics = free_ports(2)
    settings = MasterSettings(port=port, metrics_port=metrics, lease_seconds=0.3, client_ttl_seconds=2)
    with running_master(settings, tmp_path_factory.mktemp("master") / "master.log"):
        yield settings


@pytest.fixture(scope="module")
def mooncake_settings(master: MasterSettings) -> MooncakeStore:
    return MooncakeStore(master=master.address, capacity_bytes=SMALL, transfer_timeout_seconds=5)


@pytest.fixture(scope="module", params=["files", "mooncake"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StoreSettings:
    """Settings of a small store of each kind."""
    if request.param == "files":
        folder = tmp_path_factory.mktemp("files") / "store"
        return FileStore(kind="files", folder=str(folder), capacity_bytes=SMALL)
    return request.getfixturevalue("mooncake_settings")


@pytest.fixture(scope="module")
def stores(settings: StoreSettings) -> Iterator[tuple[FeatureStore, FeatureStore]]:
    """A server's client, which contributes, and a trainer rank's. Tests remove what they put, as closing
    a Mooncake client takes seconds."""
    server, rank = open_store(settings, contribute=True), open_store(settings, contribute=False)
    yield server, rank
    rank.close()
    server.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., FeatureStore]]:
    """Opens stores that are closed after the test."""
    with ExitStack() as stack:

        def make(settings: StoreSettings, *, contribute: bool = False) -> FeatureStore:
            store = open_store(settings, contribute=contribute)
            stack.callback(store.close)
            return store

        yield make
