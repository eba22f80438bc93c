"""What every store promises, tried on each with two clients."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specforge_capture.stores.base import (
    FeatureStore,
    MissingObject,
    ShortObject,
    StoreError,
    StoreFull,
)

Stores = tuple[FeatureStore, FeatureStore]
MIB = 1 << 20


def noise(shape: int | tuple[int, ...], dtype: torch.dtype = torch.uint8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.randint(0, 200, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
def test_every_client_reads_what_was_put(stores: Stores, dtype: torch.dtype) -> None:
    server, rank = stores
    objects = [(f"run/0-{i}-0/0", noise((i + 1, 7), dtype, seed=i)) for i in range(5)]
    server.put(objects)
    for store in stores:
        found = [(key, torch.zeros_like(tensor)) for key, tensor in objects]
        store.get_into(found)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(objects, found, strict=True))
    rank.remove([key for key, _ in objects])


def test_views_of_registered_memory_are_used(stores: Stores) -> None:
    server, rank = stores
    source, sink = noise((8, 1024)), torch.zeros(8, 1024, dtype=torch.uint8)
    server.register(source)
    rank.register(sink)
    server.put([(f"r/{i}", source[i]) for i in range(8)])
    rank.get_into([(f"r/{i}", sink[7 - i]) for i in range(8)])
    assert torch.equal(sink, source.flip(0))
    server.remove_prefix("r/")
    server.unregister(source)
    rank.unregister(sink)


@pytest.mark.parametrize("size", [MIB, MIB // 2, 2 * MIB])
def test_a_second_put_replaces(stores: Stores, size: int) -> None:
    server, rank = stores
    server.put([("twice", noise(MIB)), ("other", noise(8))])
    rank.get_into([("twice", torch.zeros(MIB, dtype=torch.uint8))])  # also while a lease holds it
    second = noise(size, seed=1)
    server.put([("twice", second)])
    found = torch.zeros_like(second)
    rank.get_into([("twice", found)])
    assert torch.equal(found, second)
    server.remove(["twice", "other"])


def test_a_missing_object_is_named(stores: Stores) -> None:
    server, rank = stores
    server.put([("here", noise(8))])
    with pytest.raises(MissingObject, match="'gone/1'"):
        rank.get_into([("here", torch.zeros(8, dtype=torch.uint8)), ("gone/1", torch.zeros(8))])
    server.remove(["here", "never there"])
    with pytest.raises(MissingObject, match="'here'"):
        rank.get_into([("here", torch.zeros(8, dtype=torch.uint8))])


@pytest.mark.parametrize("asked", [1000, 4000])
def test_an_object_of_another_length_is_refused(stores: Stores, asked: int) -> None:
    server, rank = stores
    server.put([("object", noise(2000))])
    with pytest.raises(ShortObject, match=f"'object' has 2000 bytes; required: {asked}"):
        rank.get_into([("object", torch.zeros(asked, dtype=torch.uint8))])
    server.remove(["object"])


def test_a_prefix_is_taken_literally(stores: Stores) -> None:
    server, rank = stores
    keys = ["a.b/0-1-0/0", "a.b/0-1-0/1", "a.b/0-10-0/0", "axb/0-1-0/0", "c+(d)[e]{f}^$|/0"]
    server.put([(key, noise(16)) for key in keys])
    assert rank.remove_prefix("a.b/0-1-0/") == 2
    assert rank.remove_prefix("a.b/0-1-0/") == 0
    assert rank.remove_prefix("c+(d)[e]{f}^$|/") == 1
    found = torch.zeros(16, dtype=torch.uint8)
    rank.get_into([("a.b/0-10-0/0", found), ("axb/0-1-0/0", found)])
    assert rank.remove_prefix("a") == 2


def test_a_full_store_keeps_what_it_has(stores: Stores) -> None:
    server, rank = stores
    source, kept = noise((64, MIB), seed=3), []

    def fill() -> None:
        for i in range(64):
            server.put([(f"full/{i}", source[i])])
            kept.append(i)

    with pytest.raises(StoreFull, match="no room for 1048576 bytes"):
        fill()
    assert 12 <= len(kept) <= 16
    for i in kept:
        found = torch.zeros(MIB, dtype=torch.uint8)
        rank.get_into([(f"full/{i}", found)])
        assert torch.equal(found, source[i])
    rank.remove(["full/0"])  # although it was read just now
    server.put([("full/again", source[0])])
    assert server.remove_prefix("full/") == len(kept)


def test_an_empty_or_strided_tensor_is_refused(stores: Stores) -> None:
    server, _ = stores
    for wrong in (torch.zeros(0), torch.zeros(4, 4).t()):
        with pytest.raises(ValueError, match="required: a contiguous one on the host"):
            server.put([("x", wrong)])


def test_a_closed_store_refuses_every_call(settings: Any, opened: Callable[..., FeatureStore]) -> None:
    server = opened(settings)
    tensor = noise(8)
    server.close()
    server.close()
    calls: list[Callable[[], object]] = [
        lambda: server.put([("x", tensor)]),
        lambda: server.get_into([("x", tensor)]),
        lambda: server.remove(["x"]),
        lambda: server.remove_prefix("x"),
        lambda: server.register(tensor),
        lambda: server.unregister(tensor),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="is closed"):
            call()


def test_closing_during_traffic_ends_it_with_an_error(
    stores: Stores, settings: Any, opened: Callable[..., FeatureStore]
) -> None:
    server, rank = opened(settings), stores[1]
    source, ended = noise(MIB), []

    def traffic(name: str) -> None:
        found = torch.zeros_like(source)
        try:
            while True:
                server.put([(name, source)])
                rank.get_into([(name, found)])
        except StoreError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=traffic, args=(f"t{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    threading.Event().wait(0.2)
    server.close()
    for thread in threads:
        thread.join(20)
    rank.remove_prefix("t")
    assert len(ended) == 3
    assert all("is closed" in message for message in ended)
