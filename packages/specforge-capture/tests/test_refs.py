import json
import zlib
from typing import Any

import pytest

from specforge_capture.refs import FeatureRef, checksum, feature_width
from specforge_config.features import CaptureSpec


def ref(**changes: Any) -> FeatureRef:
    fields: dict[str, Any] = {
        "key": "run/0-7-1",
        "sample_id": "chats.jsonl:8",
        "rows": 10,
        "width": 6,
        "dtype": "bfloat16",
        "piece_rows": 4,
        "checksums": (1, 2, 3),
        "spec_hash": "ab" * 32,
    }
    return FeatureRef(**{**fields, **changes})


def test_pieces_cover_the_rows() -> None:
    assert list(ref().pieces()) == [
        ("run/0-7-1/0", 0, 4, 1),
        ("run/0-7-1/1", 4, 8, 2),
        ("run/0-7-1/2", 8, 10, 3),
    ]
    assert ref().keys == ("run/0-7-1/0", "run/0-7-1/1", "run/0-7-1/2")
    assert ref().nbytes == 10 * 6 * 2


def test_refs_pass_through_json() -> None:
    assert FeatureRef.from_json(json.loads(json.dumps(ref().to_json()))) == ref()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"rows": 0}, "rows is 0"),
        ({"piece_rows": -1}, "piece_rows is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"rows": 13}, "it has 3 checksums; required: 4"),
        ({"checksums": ()}, "it has 0 checksums; required: 3"),
    ],
)
def test_fields_must_fit_each_other(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"feature ref 'run/0-7-1': {fault}"):
        ref(**changes)
    with pytest.raises(ValueError, match=fault):
        FeatureRef.from_json(
            {**ref().to_json(), **changes, "checksums": list(changes.get("checksums", (1, 2, 3)))}
        )


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {**ref().to_json(), "more": 1},
        {**ref().to_json(), "rows": "10"},
        {**ref().to_json(), "rows": True},
        {**ref().to_json(), "rows": 10.0},
        {**ref().to_json(), "checksums": 5},
        {**ref().to_json(), "checksums": [1, "2", 3]},
    ],
)
def test_malformed_json_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="feature ref"):
        FeatureRef.from_json(value)


def test_checksums_are_crc32(spec: CaptureSpec) -> None:
    data = bytes(range(256)) * 3
    assert checksum(memoryview(data)) == zlib.crc32(data)
    assert feature_width(spec) == 4 * spec.hidden_size
    assert feature_width(spec.model_copy(update={"final_state": False})) == 3 * spec.hidden_size
