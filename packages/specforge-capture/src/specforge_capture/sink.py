"""The sink: states on their way from a capture server's prefill into the store.

Whoever runs the model adds rows as they appear and goes on. One writer thread cuts them into pieces, copies
each into a registered ring of host memory (pinned, and on a stream of its own, where the rows are on a GPU)
and puts what the ring holds, of all captures together, in one go. The ring has two halves: while one is being
put, copies fill the other.

Invariants:
- Host memory is bounded by the ring, and whole pieces that wait for it by `max_pending_bytes`: `add` blocks
  above that. Beyond, a capture keeps the rows of one unfinished piece. So a row of any length passes.
- A capture is answered once each of its pieces is readable, or failed; one whose rows do not come in order
  and whole has failed. What a failed or dropped capture had stored is removed.
- A store that fails costs the captures whose pieces it refused, and no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specforge_capture.refs import ELEMENT_BYTES, FeatureRef, checksum, piece_key
from specforge_capture.stores.base import FeatureStore, StoreError
from specforge_capture.stores.memory import host_view

PIECE_BYTES = 32 << 20
"""Largest piece, if the ring's halves hold it: large enough that a transfer's overhead vanishes."""
_CHECKSUM_THREADS = 4

Outcome = FeatureRef | Exception


class Sink:
    """Takes captures of one server, of any number at a time, from any thread.

    Args:
        store: where pieces go; it is not closed by the sink.
        spec_hash: `spec_hash` of the capture contract.
        width: elements of a row.
        dtype: element type, by its name in the contract.
        ring_bytes: host memory for copies, of which each half must hold a row.
        max_pending_bytes: bytes of whole pieces that may wait before `add` blocks.

    Raises:
        ValueError: for an unknown element type, or a ring that is too small.
        StoreError: if the store does not take the ring's memory.
    """

    def __init__(
        self,
        store: FeatureStore,
        spec_hash: str,
        width: int,
        dtype: str,
        *,
        ring_bytes: int = 256 << 20,
        max_pending_bytes: int = 1 << 30,
    ) -> None:
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype is {dtype!r}; required: one of {list(ELEMENT_BYTES)}")
        row_bytes, half = width * ELEMENT_BYTES[dtype], ring_bytes // 2
        if half < row_bytes:
            raise ValueError(f"ring_bytes is {ring_bytes}; required: at least two rows of {row_bytes} bytes")
        self.spec_hash = spec_hash
        self.width = width
        self.dtype = dtype
        self.piece_rows = max(1, min(PIECE_BYTES, half) // row_bytes)
        self._row_bytes = row_bytes
        self._store = store
        self._max_pending = max_pending_bytes
        self._ring = torch.empty(2 * half, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
        store.register(self._ring)
        self._halves = self._ring.split(half)
        self._stream: torch.cuda.Stream | None = None
        self._state = threading.Condition()
        self._waiting: deque[_Piece | _End] = deque()
        self._pending = 0
        self._open: dict[str, Capture] = {}
        self._closing = False
        self._broken: BaseException | None = None
        self._checksums = ThreadPoolExecutor(_CHECKSUM_THREADS, "capture-checksum")
        self._writer = threading.Thread(target=self._run, name="capture-writer", daemon=True)
        self._writer.start()

    def open(self, key: str, sample_id: str, rows: int) -> Capture:
        """Begin a capture.

        Args:
            key: prefix of its objects.
            sample_id: identity of the sample.
            rows: tokens of the sample.

        Raises:
            ValueError: if it has no rows, or `key` is being captured already.
            RuntimeError: if the sink is closed or its writer broke.
        """
        if rows < 1:
            raise ValueError(f"capture {key!r} has {rows} rows; required: at least 1")
        with self._state:
            self._require_running()
            if key in self._open:
                raise ValueError(
                    f"{key!r} is being captured already; required: a key of its own each attempt"
                )
            self._open[key] = capture = Capture(self, key, sample_id, rows)
        return capture

    @property
    def pending_bytes(self) -> int:
        """Bytes of whole pieces that wait to be copied."""
        return self._pending

    def close(self) -> None:
        """Write what was finished, drop what is still open, and give the ring back to the store."""
        with self._state:
            unfinished = [capture for capture in self._open.values() if not capture._ended]
        for capture in unfinished:
            capture.drop()
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._writer.join()
        self._checksums.shutdown()
        self._store.unregister(self._ring)

    def _require_running(self) -> None:
        if self._broken is not None:
            raise RuntimeError("the sink's writer thread broke") from self._broken
        if self._closing:
            raise RuntimeError("the sink is closed")

    def _queue_piece(self, piece: _Piece) -> None:
        """Hand a piece to the writer; waits while too much is pending, which the writer can always write."""
        size = piece.rows * self._row_bytes
        with self._state:
            self._state.wait_for(
                lambda: self._broken or self._pending == 0 or self._pending + size <= self._max_pending
            )
            self._require_running()
            self._pending += size
            self._waiting.append(piece)
            self._state.notify_all()

    def _queue_end(self, end: _End) -> None:
        with self._state:
            self._require_running()
            self._waiting.append(end)
            self._state.notify_all()

    def _run(self) -> None:
        """The writer: stages one half of the ring, then puts the other."""
        staged: list[_Piece | _End] = []
        half = 0
        try:
            while True:
                taken = self._take(wait=not staged)
                if taken is None:
                    return
                self._stage(taken, self._halves[half])
                half = 1 - half
                self._put(staged)
                staged = taken
        except BaseException as error:
            self._break(error)
            raise

    def _take(self, *, wait: bool) -> list[_Piece | _End] | None:
        """What fits a half, in order; None at the end. Pieces that nobody wants any more are dropped."""
        taken: list[_Piece | _End] = []
        room = self._halves[0].numel()
        with self._state:
            if wait:
                self._state.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return None
            while self._waiting:
                item = self._waiting[0]
                if isinstance(item, _Piece):
                    size = item.rows * self._row_bytes
                    if item.capture._error is not None:
                        self._pending -= size
                        self._waiting.popleft()
                        continue
                    if size > room:
                        break
                    room -= size
                taken.append(self._waiting.popleft())
            self._state.notify_all()
        return taken

    def _stage(self, items: Iterable[_Piece | _End], half: Tensor) -> None:
        """Begin to copy pieces into a half of the ring."""
        offset = 0
        for piece in items:
            if isinstance(piece, _Piece):
                size = piece.rows * self._row_bytes
                piece.host = half[offset : offset + size]
                offset += size
                rows = piece.host.view(getattr(torch, self.dtype)).view(piece.rows, self.width)
                if piece.ready is None:
                    torch.cat(piece.parts, out=rows)
                else:
                    piece.ready = self._copy_beside(piece.parts, piece.ready, rows)

    def _copy_beside(self, parts: list[Tensor], ready: torch.cuda.Event, rows: Tensor) -> torch.cuda.Event:
        """Queue copies of GPU rows on the sink's own stream. Returns the event of their end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(parts[0].device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for part, target in zip(parts, rows.split([len(part) for part in parts]), strict=True):
                target.copy_(part, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def _put(self, items: list[_Piece | _End]) -> None:
        """Put staged pieces, then answer the captures that end with them."""
        pieces = [item for item in items if isinstance(item, _Piece)]
        for piece in pieces:
            if piece.ready is not None:
                piece.ready.synchronize()
            piece.parts.clear()
        with self._state:
            self._pending -= sum(piece.rows for piece in pieces) * self._row_bytes
            self._state.notify_all()
        pieces = [piece for piece in pieces if piece.capture._error is None]
        # Beside the put: on one thread a checksum takes as long as the put does.
        sums = self._checksums.map(lambda piece: checksum(host_view(piece.host)), pieces)
        self._put_together(pieces)
        for piece, value in zip(pieces, sums, strict=True):
            piece.capture._checksums.append(value)
        for item in items:
            if isinstance(item, _End):
                self._end(item)

    def _put_together(self, pieces: list[_Piece]) -> None:
        """One put of all pieces; if the store refuses them, one a capture, so that each fails for itself."""
        if not pieces:
            return
        try:
            self._store.put([(piece.key, piece.host) for piece in pieces])
        except StoreError as error:
            captures = {piece.capture.key: piece.capture for piece in pieces}
            if len(captures) > 1:
                for capture in captures.values():
                    self._put_together([piece for piece in pieces if piece.capture is capture])
            else:
                pieces[0].capture._error = error

    def _end(self, end: _End) -> None:
        """Answer a capture, or remove what it stored."""
        capture = end.capture
        with self._state:
            if self._open.get(capture.key) is capture:
                del self._open[capture.key]
        if capture._error is None and end.callback is not None:
            end.callback(capture._ref())
            return
        error = capture._error
        try:
            self._store.remove([piece_key(capture.key, i) for i in range(len(capture._checksums))])
        except StoreError as remaining:
            if error is not None:
                error.add_note(f"what was stored of it could not be removed: {remaining}")
        if error is not None and end.callback is not None:
            end.callback(error)

    def _break(self, error: BaseException) -> None:
        """After a fault of the writer itself: let nobody wait for it."""
        with self._state:
            self._broken = error
            captures, self._open = list(self._open.values()), {}
            self._state.notify_all()
        for capture in captures:
            if capture._callback is not None:
                capture._callback(RuntimeError(f"the sink's writer thread broke: {error!r}"))


class Capture:
    """Rows of one sample on their way into the store. Made by `Sink.open`; used by one thread at a time."""

    def __init__(self, sink: Sink, key: str, sample_id: str, rows: int) -> None:
        self.key = key
        self.sample_id = sample_id
        self.rows = rows
        self._sink = sink
        self._added = 0
        self._pieces = 0
        self._held: list[Tensor] = []
        self._checksums: list[int] = []
        self._error: Exception | None = None
        self._ended = False
        self._dropped = False
        self._callback: Callable[[Outcome], None] | None = None

    def add(self, rows: Tensor, start: int) -> None:
        """Add the rows `start` and following; blocks while the sink has too much to write.

        Args:
            rows: [n, width] states, on the host or on a GPU, where they may still be computed by the current
                stream. They must not be changed afterwards.
            start: position of the first one in the sample. Rows that leave a gap, come twice or are too many
                fail the capture; `finish` then says so.

        Raises:
            ValueError: for rows of another width or element type.
            RuntimeError: if the sink is closed or its writer broke.
        """
        if rows.dim() != 2 or rows.shape[1] != self._sink.width or rows.dtype != self._dtype:
            raise ValueError(
                f"capture {self.key!r}: rows are {tuple(rows.shape)} {rows.dtype}; required: "
                f"[n, {self._sink.width}] {self._dtype}"
            )
        end = start + len(rows)
        if self._error is None and (start != self._added or end > self.rows):
            self._error = ValueError(
                f"capture {self.key!r} of {self.sample_id!r}: rows {start} to {end} came after {self._added} "
                f"of {self.rows}; required: each row once, in order"
            )
        if self._error is not None:
            self._held.clear()
            return
        self._added = end
        ready = _recorded(rows)
        while len(rows) and (piece := self._next_piece_rows()) <= len(rows) + sum(map(len, self._held)):
            own = piece - sum(map(len, self._held))
            parts, self._held = [*self._held, rows[:own]], []
            rows = rows[own:]
            self._sink._queue_piece(_Piece(self, piece_key(self.key, self._pieces), parts, piece, ready))
            self._pieces += 1
        if len(rows):
            # A copy, as a view would keep the states of the whole prefill alive.
            self._held.append(rows.clone())

    def finish(self, callback: Callable[[Outcome], None]) -> None:
        """End the capture.

        Args:
            callback: called from the writer thread, which it must not keep, with the ref once each piece is
                readable, or with what went wrong once what was stored is removed.

        Raises:
            RuntimeError: if the sink is closed or its writer broke; `callback` is then not called.
        """
        if self._error is None and self._added != self.rows:
            self._error = ValueError(
                f"short capture {self.key!r} of {self.sample_id!r}: {self._added} of {self.rows} rows came"
            )
        self._end(callback)

    def drop(self) -> None:
        """Forget the capture and remove what it stored. After `finish` too; its callback then gets the ref or
        an error, whichever comes first."""
        if self._dropped:
            return
        self._dropped = True
        self._error = self._error or StoreError(f"capture {self.key!r} was dropped")
        if self._ended:
            self._sink._queue_end(_End(self, None))
        else:
            self._end(None)

    def _end(self, callback: Callable[[Outcome], None] | None) -> None:
        self._held.clear()
        self._ended, self._callback = True, callback
        self._sink._queue_end(_End(self, callback))

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._sink.dtype)

    def _next_piece_rows(self) -> int:
        return min(self._sink.piece_rows, self.rows - self._pieces * self._sink.piece_rows)

    def _ref(self) -> FeatureRef:
        return FeatureRef(
            key=self.key,
            sample_id=self.sample_id,
            rows=self.rows,
            width=self._sink.width,
            dtype=self._sink.dtype,
            piece_rows=self._sink.piece_rows,
            checksums=tuple(self._checksums),
            spec_hash=self._sink.spec_hash,
        )


@dataclass(eq=False)
class _Piece:
    """Rows that make one object."""

    capture: Capture
    key: str
    parts: list[Tensor]
    """[n_i, width] each; kept until they are copied."""
    rows: int
    ready: torch.cuda.Event | None
    """For rows on a GPU: when they are computed, then when they are copied."""
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """Where they lie in the ring, as bytes."""


@dataclass(frozen=True, eq=False)
class _End:
    """Behind the pieces of a capture: who is told."""

    capture: Capture
    callback: Callable[[Outcome], None] | None


def _recorded(rows: Tensor) -> torch.cuda.Event | None:
    """An event behind what computes `rows`; None on the host."""
    if not rows.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(rows.device))
    return event
