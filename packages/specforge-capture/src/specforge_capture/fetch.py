"""Fetching captured states from the store into a trainer's tensors, through bounded host memory.

Invariant: what is handed out has the lengths and checksums that its ref names, under the run's own contract.

The buffer has two halves: while one is filled from the store, the other's copies to the GPU are under way.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specforge_capture.refs import ELEMENT_BYTES, FeatureRef, checksum, feature_width
from specforge_capture.stores.base import CorruptObject, FeatureStore
from specforge_capture.stores.memory import host_view
from specforge_config.features import CaptureSpec, spec_hash

_Piece = tuple[str, int, int, int]


class Fetcher:
    """Fetches samples one after the other; used by one thread at a time.

    Args:
        store: where pieces lie; it is not closed by the fetcher.
        spec: the run's contract.
        device: where the output tensors lie.
        buffer_bytes: host memory for transfers, of which each half must hold a piece; on a GPU as much again
            is taken there.

    Raises:
        StoreError: if the store does not take the buffer's memory.
    """

    def __init__(
        self, store: FeatureStore, spec: CaptureSpec, device: torch.device, *, buffer_bytes: int = 256 << 20
    ) -> None:
        self._store = store
        self._spec_hash = spec_hash(spec)
        self._hidden_width = len(spec.layer_ids) * spec.hidden_size
        self._width = feature_width(spec)
        self._dtype = getattr(torch, spec.dtype)
        self._row_bytes = self._width * ELEMENT_BYTES[spec.dtype]
        cuda = device.type == "cuda"
        self._buffer = torch.empty(buffer_bytes // 2 * 2, dtype=torch.uint8, pin_memory=cuda)
        self._halves = self._buffer.chunk(2)
        self._staging = [torch.empty_like(half, device=device) for half in self._halves] if cuda else None
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        store.register(self._buffer)

    def fetch(self, ref: FeatureRef, out_hidden: Tensor, out_last: Tensor | None) -> None:
        """Fill a sample's tensors, piece by piece.

        Args:
            ref: the sample.
            out_hidden: [T, K·H], T being the ref's rows; on the fetcher's device, where the current stream
                fills it.
            out_last: [T, H] for the final state; None under a contract without it.

        Raises:
            MissingObject: if a piece is not there.
            ShortObject: if a piece has another length than its rows.
            CorruptObject: if a piece has other bytes than were captured.
            StoreError: if the store failed.
            ValueError: if the ref is of another contract, the tensors do not fit, or a piece exceeds half of
                the buffer.
        """
        self._check(ref, out_hidden, out_last)
        outs = [out_hidden] if out_last is None else [out_hidden, out_last]
        for pieces in self._batches(ref):
            turn, self._turn = self._turn, 1 - self._turn
            if (copied := self._copied[turn]) is not None:
                copied.synchronize()
            first, last = pieces[0][1], pieces[-1][2]
            host = self._halves[turn][: (last - first) * self._row_bytes]
            self._get(ref, pieces, host)
            rows = self._on_device(host, turn).view(self._dtype).view(last - first, self._width)
            for out, columns in zip(outs, rows.split([out.shape[1] for out in outs], dim=1), strict=True):
                out[first:last].copy_(columns)
            if self._staging is not None:
                self._copied[turn] = torch.cuda.current_stream(out_hidden.device).record_event()

    def close(self) -> None:
        """Give the buffer back to the store."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
        self._store.unregister(self._buffer)

    def _batches(self, ref: FeatureRef) -> Iterator[list[_Piece]]:
        """Pieces in groups that fill a half of the buffer."""
        most = max(1, self._halves[0].numel() // (ref.piece_rows * self._row_bytes))
        pieces = list(ref.pieces())
        for first in range(0, len(pieces), most):
            yield pieces[first : first + most]

    def _get(self, ref: FeatureRef, pieces: list[_Piece], host: Tensor) -> None:
        """Get consecutive pieces into `host` and verify them."""
        parts = host.split([(last - first) * self._row_bytes for _, first, last, _ in pieces])
        self._store.get_into([(key, part) for (key, *_), part in zip(pieces, parts, strict=True)])
        for (key, _, _, wanted), part in zip(pieces, parts, strict=True):
            if (found := checksum(host_view(part))) != wanted:
                raise CorruptObject(
                    f"object {key!r} of sample {ref.sample_id!r} has checksum {found}; required: {wanted}"
                )

    def _on_device(self, host: Tensor, turn: int) -> Tensor:
        """Bytes where the outputs are. Whole rows travel, as strided copies from the host are slow."""
        if self._staging is None:
            return host
        staged = self._staging[turn][: host.numel()]
        return staged.copy_(host, non_blocking=True)

    def _check(self, ref: FeatureRef, out_hidden: Tensor, out_last: Tensor | None) -> None:
        last_width = self._width - self._hidden_width
        found = {
            "spec_hash": (ref.spec_hash, self._spec_hash),
            "width": (ref.width, self._width),
            "dtype": (getattr(torch, ref.dtype), self._dtype),
            "out_hidden": (_kind(out_hidden), ((ref.rows, self._hidden_width), self._dtype)),
            "out_last": (_kind(out_last), ((ref.rows, last_width), self._dtype) if last_width else None),
        }
        if wrong := [f"{name} is {a}, required {b}" for name, (a, b) in found.items() if a != b]:
            raise ValueError(f"sample {ref.sample_id!r} ({ref.key!r}): " + "; ".join(wrong))
        piece, half = min(ref.piece_rows, ref.rows) * self._row_bytes, self._halves[0].numel()
        if piece > half:
            raise ValueError(
                f"a piece of sample {ref.sample_id!r} has {piece} bytes, half of the fetch buffer {half}; "
                f"required: buffer_bytes of at least {2 * piece}"
            )


def _kind(out: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if out is None else (tuple(out.shape), out.dtype)
