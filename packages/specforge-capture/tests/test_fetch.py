"""Fetching what the sink stored, and what a fetch refuses."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from specforge_capture.fetch import Fetcher
from specforge_capture.refs import FeatureRef, feature_width
from specforge_capture.sink import Sink
from specforge_capture.stores.base import CorruptObject, MissingObject, ShortObject
from specforge_capture.stores.files import Files
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.store import FileStore

ROWS = 23


@pytest.fixture
def store(tmp_path: Path) -> Files:
    return Files(FileStore(kind="files", folder=str(tmp_path / "store")))


@pytest.fixture
def put(store: Files) -> Callable[[CaptureSpec, Tensor], FeatureRef]:
    """Stores states in pieces of four rows."""

    def put(spec: CaptureSpec, states: Tensor) -> FeatureRef:
        sink = Sink(store, spec_hash(spec), states.shape[1], spec.dtype, ring_bytes=2 * states[:4].nbytes)
        told: Queue[Any] = Queue()
        capture = sink.open("run/0-0-0", "a:1", len(states))
        capture.add(states, 0)
        capture.finish(told.put)
        sink.close()
        return told.get_nowait()

    return put


@pytest.fixture
def fetcher(store: Files) -> Iterator[Callable[..., Fetcher]]:
    made: list[Fetcher] = []

    def make(spec: CaptureSpec, pieces: int = 2) -> Fetcher:
        size = 2 * pieces * 4 * feature_width(spec) * torch.finfo(getattr(torch, spec.dtype)).bits // 8
        made.append(Fetcher(store, spec, torch.device("cpu"), buffer_bytes=size))
        return made[-1]

    yield make
    for each in made:
        each.close()


def empty(spec: CaptureSpec, rows: int = ROWS) -> tuple[Tensor, Tensor | None]:
    """Output tensors full of NaN."""
    dtype, width = getattr(torch, spec.dtype), len(spec.layer_ids) * spec.hidden_size
    last = torch.full((rows, spec.hidden_size), torch.nan, dtype=dtype) if spec.final_state else None
    return torch.full((rows, width), torch.nan, dtype=dtype), last


@pytest.mark.parametrize("pieces", [1, 2, 100])
@pytest.mark.parametrize("final_state", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_captured_is_fetched(
    spec: CaptureSpec, put: Any, fetcher: Any, pieces: int, final_state: bool, dtype: str
) -> None:
    spec = CaptureSpec.model_validate({**spec.model_dump(), "final_state": final_state, "dtype": dtype})
    states = torch.randn(ROWS, feature_width(spec)).to(getattr(torch, dtype))
    ref = put(spec, states)
    assert ref.piece_rows == 4
    for _ in range(2):
        hidden, last = empty(spec)
        fetcher(spec, pieces).fetch(ref, hidden, last)
        assert torch.equal(torch.cat([hidden, last], 1) if last is not None else hidden, states)


def states_of(spec: CaptureSpec) -> Tensor:
    return torch.randn(ROWS, feature_width(spec))


@pytest.mark.parametrize("piece", [0, 3, 5])
def test_a_piece_that_is_missing_short_or_changed_is_named(
    spec: CaptureSpec, put: Any, fetcher: Any, store: Files, piece: int
) -> None:
    ref = put(spec, states_of(spec))
    file = store.folder / f"run%2F0-0-0%2F{piece}"
    content = bytearray(file.read_bytes())
    content[17] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptObject, match=f"'run/0-0-0/{piece}' of sample 'a:1' has checksum"):
        fetcher(spec).fetch(ref, *empty(spec))
    os.truncate(file, 100)
    with pytest.raises(ShortObject, match=f"'run/0-0-0/{piece}' has 100 bytes"):
        fetcher(spec).fetch(ref, *empty(spec))
    store.remove([f"run/0-0-0/{piece}"])
    with pytest.raises(MissingObject, match=f"'run/0-0-0/{piece}'"):
        fetcher(spec).fetch(ref, *empty(spec))


def test_another_contract_or_shape_is_refused(spec: CaptureSpec, put: Any, fetcher: Any) -> None:
    ref = put(spec, states_of(spec))
    wrong: list[tuple[FeatureRef, int, str]] = [
        (replace(ref, spec_hash="other"), ROWS, "spec_hash is other, required"),
        (replace(ref, width=4), ROWS, "width is 4, required 128"),
        (replace(ref, dtype="bfloat16"), ROWS, r"dtype is torch\.bfloat16, required torch\.float32"),
        (ref, ROWS - 1, r"out_hidden is \(\(22, 96\), .*, required \(\(23, 96\), "),
    ]
    for given, rows, fault in wrong:
        with pytest.raises(ValueError, match=fault):
            fetcher(spec).fetch(given, *empty(spec, rows))
    with pytest.raises(ValueError, match=r"out_last is None, required \(\(23, 32\)"):
        fetcher(spec).fetch(ref, empty(spec)[0], None)


def test_a_piece_must_fit_half_of_the_buffer(spec: CaptureSpec, put: Any, store: Files) -> None:
    ref = put(spec, states_of(spec))
    small = Fetcher(store, spec, torch.device("cpu"), buffer_bytes=4094)
    with pytest.raises(
        ValueError, match="2048 bytes, half of the fetch buffer 2047; required: buffer_bytes of"
    ):
        small.fetch(ref, *empty(spec))
    small.close()
