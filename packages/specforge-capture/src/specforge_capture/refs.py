"""References to captured features: what a capture server answers with and a ledger keeps.

A sample's features are rows [rows, width], cut into pieces of `piece_rows` rows (the last may have fewer),
each one object of the store. width is (K + 1)·H: the states of the contract's layers in its order, then the
final post-norm state; K·H without the final state.

Invariant: a ref alone says how many bytes each piece has and what they sum up to, so that whoever fetches
them can tell a short or changed object.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from specforge_config.features import CaptureSpec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the names that a contract uses."""


@dataclass(frozen=True)
class FeatureRef:
    """Where one sample's features lie, and what they are."""

    key: str
    """Prefix of the sample's objects: `<run>/<epoch>-<position>-<attempt>`."""
    sample_id: str
    """Identity of the sample."""
    rows: int
    """Tokens of the sample."""
    width: int
    """Elements of a row."""
    dtype: str
    """Element type."""
    piece_rows: int
    """Rows of each piece but the last, which has what is left."""
    checksums: tuple[int, ...]
    """`checksum` of each piece's bytes."""
    spec_hash: str
    """`spec_hash` of the capture contract."""

    def __post_init__(self) -> None:
        """Check that the fields fit each other.

        Raises:
            ValueError: naming the ref's key and what is wrong.
        """
        wrong = [
            f"{name} is {getattr(self, name)}; required: at least 1"
            for name in ("rows", "width", "piece_rows")
            if getattr(self, name) < 1
        ]
        if self.dtype not in ELEMENT_BYTES:
            wrong.append(f"dtype is {self.dtype!r}; required: one of {list(ELEMENT_BYTES)}")
        if not wrong and len(self.checksums) != (pieces := -(-self.rows // self.piece_rows)):
            wrong.append(
                f"it has {len(self.checksums)} checksums; required: {pieces}, one a piece of "
                f"{self.piece_rows} rows of {self.rows}"
            )
        if wrong:
            raise ValueError(f"feature ref {self.key!r}: " + "; ".join(wrong))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * ELEMENT_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self.rows * self.row_bytes

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the pieces, in order of their rows."""
        return tuple(piece_key(self.key, index) for index in range(len(self.checksums)))

    def pieces(self) -> Iterator[tuple[str, int, int, int]]:
        """(key, first row, row behind the last, checksum) of each piece."""
        for index, (key, checksum) in enumerate(zip(self.keys, self.checksums, strict=True)):
            first = index * self.piece_rows
            yield key, first, min(first + self.piece_rows, self.rows), checksum

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: numbers, strings and one list."""
        return {**asdict(self), "checksums": list(self.checksums)}

    @classmethod
    def from_json(cls, value: Any) -> FeatureRef:
        """The ref that decoded JSON holds.

        Raises:
            ValueError: if it is malformed.
        """
        types = {field.name: _JSON_TYPES[str(field.type)] for field in fields(cls)}
        if not isinstance(value, dict) or value.keys() != types.keys():
            raise ValueError(f"not a feature ref: {value!r:.200}; required: an object with {list(types)}")
        for name, kind in types.items():
            if type(value[name]) is not kind:
                raise ValueError(f"feature ref: {name} is {value[name]!r:.100}; required: {kind.__name__}")
        if any(type(item) is not int for item in value["checksums"]):
            raise ValueError(f"feature ref: checksums are {value['checksums']!r:.100}; required: integers")
        found: dict[str, Any] = {**value, "checksums": tuple(value["checksums"])}
        return cls(**found)


_JSON_TYPES = {"str": str, "int": int, "tuple[int, ...]": list}


def piece_key(key: str, index: int) -> str:
    """The store's key of piece `index` of the sample under `key`."""
    return f"{key}/{index}"


def feature_width(spec: CaptureSpec) -> int:
    """Elements of a row under `spec`."""
    return (len(spec.layer_ids) + spec.final_state) * spec.hidden_size


def checksum(data: memoryview) -> int:
    """CRC-32 of a piece's bytes. Other threads run while it is computed."""
    return zlib.crc32(data)
