"""The sink over a file store, with stores that fail or wait where a test says so."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor

from specforge_capture.refs import FeatureRef
from specforge_capture.sink import Capture, Sink
from specforge_capture.stores.base import MissingObject, StoreError
from specforge_capture.stores.files import Files
from specforge_config.store import FileStore

WIDTH = 16
ROW = WIDTH * 2
RING = 8 * ROW
"""Pieces of four rows, one a half."""


class Watched(Files):
    """A file store that notes its puts, waits at a gate, and refuses keys."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FileStore(kind="files", folder=str(folder)))
        self.puts: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.at_gate = threading.Event()
        self.refused = "\0"
        self.error: Exception = StoreError("it refuses")

    def put(self, objects: Sequence[tuple[str, Tensor]]) -> None:
        self.puts.append([key for key, _ in objects])
        self.at_gate.set()
        assert self.gate.wait(60)
        if any(self.refused in key for key, _ in objects):
            raise self.error
        super().put(objects)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name != ".lock")


@pytest.fixture
def store(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "store")


@pytest.fixture
def make_sink(store: Watched) -> Iterator[Callable[..., Sink]]:
    sinks: list[Sink] = []

    def make(**settings: Any) -> Sink:
        settings = {"ring_bytes": RING, "max_pending_bytes": 1 << 20, **settings}
        sinks.append(Sink(store, "hash", WIDTH, "bfloat16", **settings))
        return sinks[-1]

    yield make
    store.gate.set()
    for sink in sinks:
        sink.close()


def states(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator).bfloat16()


def outcome(capture: Capture) -> FeatureRef | Exception:
    """Finishes a capture and waits for what became of it."""
    told: Queue[FeatureRef | Exception] = Queue()
    capture.finish(told.put)
    return told.get(timeout=60)


def stored(store: Files, ref: FeatureRef) -> Tensor:
    rows = torch.empty(ref.rows, WIDTH, dtype=torch.bfloat16)
    store.get_into([(key, rows[first:last]) for key, first, last, _ in ref.pieces()])
    return rows


def ref_of(found: FeatureRef | Exception) -> FeatureRef:
    assert isinstance(found, FeatureRef), found
    return found


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 23])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 30])
def test_rows_arrive_whatever_their_chunks(make_sink: Any, store: Watched, rows: int, chunk: int) -> None:
    sink, wanted = make_sink(), states(rows)
    capture = sink.open("run/0-0-0", "a:1", rows)
    for start in range(0, rows, chunk):
        capture.add(wanted[start : start + chunk], start)
    ref = ref_of(outcome(capture))
    assert (ref.key, ref.sample_id, ref.rows, ref.width, ref.dtype) == (
        "run/0-0-0",
        "a:1",
        rows,
        WIDTH,
        "bfloat16",
    )
    assert (ref.piece_rows, ref.spec_hash) == (4, "hash")
    assert torch.equal(stored(store, ref), wanted)
    assert sink.pending_bytes == 0


def test_parts_of_a_row_layout_are_copied(make_sink: Any, store: Watched) -> None:
    wide = torch.randn(6, 2 * WIDTH).bfloat16()
    capture = make_sink().open("k", "s", 6)
    capture.add(wide[:, ::2], 0)
    assert torch.equal(stored(store, ref_of(outcome(capture))), wide[:, ::2])


def test_captures_together_make_one_put(make_sink: Any, store: Watched) -> None:
    sink = make_sink(ring_bytes=64 * ROW)
    store.gate.clear()
    first = sink.open("first", "s", 2)
    first.add(states(2), 0)
    assert store.at_gate.wait(60)
    others = [sink.open(f"c{i}", "s", 2) for i in range(5)]
    told: Queue[Any] = Queue()
    for i, capture in enumerate(others):
        capture.add(states(2, seed=i), 0)
        capture.finish(told.put)
    assert told.empty()  # nothing is answered before it is readable
    store.gate.set()
    refs = [ref_of(told.get(timeout=60)) for _ in others]
    assert store.puts == [["first/0"], [f"c{i}/0" for i in range(5)]]
    assert all(torch.equal(stored(store, ref), states(2, seed=i)) for i, ref in enumerate(refs))
    ref_of(outcome(first))


def test_adding_waits_while_too_much_is_pending(make_sink: Any, store: Watched) -> None:
    sink = make_sink(max_pending_bytes=8 * ROW)
    store.gate.clear()
    capture, added = sink.open("k", "s", 40), []

    def add() -> None:
        for start in range(0, 40, 4):
            capture.add(states(4, seed=start), start)
            added.append(start)

    adding = threading.Thread(target=add)
    adding.start()
    assert store.at_gate.wait(60)
    time.sleep(0.3)
    # One piece is being put, one lies in the other half, two are pending; the next waits.
    assert len(added) <= 4
    assert sink.pending_bytes <= 8 * ROW
    store.gate.set()
    adding.join(60)
    assert len(added) == 10
    assert torch.equal(stored(store, ref_of(outcome(capture)))[36:], states(4, seed=36))


def test_unfinished_pieces_of_many_captures_never_lock(make_sink: Any, store: Watched) -> None:
    sink = make_sink(max_pending_bytes=ROW)
    captures = [sink.open(f"c{i}", "s", 4) for i in range(20)]
    for start in range(4):
        for i, capture in enumerate(captures):
            capture.add(states(4, seed=i)[start : start + 1], start)
    for i, capture in enumerate(captures):
        assert torch.equal(stored(store, ref_of(outcome(capture))), states(4, seed=i))


def test_held_rows_keep_no_prefill_alive(make_sink: Any) -> None:
    capture = make_sink().open("k", "s", 10)
    capture.add(states(1000)[:1], 0)
    assert capture._held[0].untyped_storage().nbytes() == ROW


@pytest.mark.parametrize(
    ("adds", "fault"),
    [
        ([(0, 4)], "short capture 'k' of 's': 4 of 6 rows came"),
        ([(0, 4), (5, 1)], "rows 5 to 6 came after 4 of 6"),
        ([(0, 4), (0, 4)], "rows 0 to 4 came after 4 of 6"),
        ([(0, 4), (4, 3)], "rows 4 to 7 came after 4 of 6"),
        ([], "0 of 6 rows came"),
    ],
)
def test_a_capture_that_is_not_whole_fails(
    make_sink: Any, store: Watched, adds: list[tuple[int, int]], fault: str
) -> None:
    sink = make_sink()
    capture = sink.open("k", "s", 6)
    for start, count in adds:
        capture.add(states(count), start)
    error = outcome(capture)
    assert isinstance(error, ValueError)
    assert fault in str(error)
    assert store.names == []
    ref_of(outcome_of_whole(sink, "k"))  # the same key may be tried again


def outcome_of_whole(sink: Sink, key: str) -> FeatureRef | Exception:
    capture = sink.open(key, "s", 5)
    capture.add(states(5), 0)
    return outcome(capture)


def test_a_refused_put_costs_its_own_capture_alone(make_sink: Any, store: Watched) -> None:
    sink = make_sink(ring_bytes=64 * ROW)
    store.refused = "bad/1"
    store.gate.clear()
    outcome_first: Queue[Any] = Queue()
    blocking = sink.open("blocking", "s", 1)
    blocking.add(states(1), 0)
    blocking.finish(outcome_first.put)
    assert store.at_gate.wait(60)
    told: Queue[Any] = Queue()
    rows = sink.piece_rows + 1
    for key in ("good", "bad", "fine"):
        capture = sink.open(key, "s", rows)
        capture.add(states(rows), 0)
        capture.finish(told.put)
    store.gate.set()
    good, bad, fine = (told.get(timeout=60) for _ in range(3))
    assert torch.equal(stored(store, ref_of(good)), states(rows))
    assert torch.equal(stored(store, ref_of(fine)), states(rows))
    assert str(bad) == "it refuses"
    assert not any(name.startswith("bad") for name in store.names)


def test_a_dropped_capture_leaves_nothing(make_sink: Any, store: Watched) -> None:
    sink = make_sink()
    capture = sink.open("k", "s", 12)
    capture.add(states(8), 0)
    capture.drop()
    capture.drop()
    ref_of(outcome_of_whole(sink, "other"))
    assert store.names == ["other%2F0", "other%2F1"]
    with pytest.raises(MissingObject):
        store.get_into([("k/0", states(4))])


def test_a_key_is_captured_once_at_a_time(make_sink: Any) -> None:
    sink = make_sink()
    sink.open("k", "s", 1)
    with pytest.raises(ValueError, match="'k' is being captured already"):
        sink.open("k", "s", 1)


def test_closing_finishes_what_is_finished_and_drops_the_rest(make_sink: Any, store: Watched) -> None:
    sink, told = make_sink(), Queue[Any]()
    store.gate.clear()
    done, left = sink.open("done", "s", 9), sink.open("left", "s", 9)
    done.add(states(9), 0)
    left.add(states(8), 0)
    done.finish(told.put)
    threading.Timer(0.2, store.gate.set).start()
    sink.close()
    assert torch.equal(stored(store, ref_of(told.get_nowait())), states(9))
    assert [name for name in store.names if name.startswith("left")] == []
    with pytest.raises(RuntimeError, match="is closed"):
        sink.open("k", "s", 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_writer_lets_nobody_wait(make_sink: Any, store: Watched) -> None:
    sink, told = make_sink(max_pending_bytes=ROW), Queue[Any]()
    store.refused, store.error = "k", TypeError("a fault of the store")
    store.gate.clear()
    capture, late = sink.open("k", "s", 4), sink.open("late", "s", 400)
    capture.add(states(4), 0)
    capture.finish(told.put)
    assert store.at_gate.wait(60)
    threading.Timer(0.2, store.gate.set).start()
    with pytest.raises(RuntimeError, match="writer thread broke"):
        late.add(states(400), 0)
    assert "a fault of the store" in str(told.get(timeout=60))
    with pytest.raises(RuntimeError, match="writer thread broke"):
        sink.open("more", "s", 1)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [({"ring_bytes": 2 * ROW - 2}, "ring_bytes is 62; required: at least two rows of 32 bytes")],
)
def test_a_ring_holds_two_rows(make_sink: Any, settings: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        make_sink(**settings)


def test_rows_of_another_kind_are_refused(make_sink: Any) -> None:
    capture = make_sink().open("k", "s", 4)
    for wrong in (torch.zeros(4, WIDTH), torch.zeros(4, WIDTH + 1).bfloat16(), torch.zeros(WIDTH).bfloat16()):
        with pytest.raises(ValueError, match=r"required: \[n, 16\] torch\.bfloat16"):
            capture.add(wrong, 0)
