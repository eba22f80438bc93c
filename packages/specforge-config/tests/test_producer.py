from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.producer import ConsumerConfig, ProducerConfig, Watermarks


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"high_samples": 4, "low_samples": 8}, "high_samples is 4, low_samples is 8"),
        ({"high_bytes": 4, "low_bytes": 8}, "high_bytes is 4, low_bytes is 8"),
        ({"low_bytes": 8}, "low_bytes is set without high_bytes"),
        ({"in_flight": 0}, "in_flight"),
        ({"retries": -1}, "retries"),
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        ProducerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "marks"),
    [
        ({}, Watermarks(32, 16, None, None)),
        ({"high_samples": 8}, Watermarks(8, 8, None, None)),
        ({"low_samples": 100}, Watermarks(100, 100, None, None)),
        ({"high_samples": 24, "low_samples": 9, "high_bytes": 700}, Watermarks(24, 9, 700, 350)),
        # The byte marks of a run whose window fits below the high one only.
        ({"high_samples": 8, "high_bytes": 800, "low_bytes": 650}, Watermarks(8, 8, 800, 650)),
    ],
)
def test_marks_that_are_not_set_follow_from_the_window(fields: dict[str, Any], marks: Watermarks) -> None:
    assert ProducerConfig(**fields).watermarks(8, 672) == marks


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"low_samples": 7}, "low_samples is 7; required: at least one optimizer window, 8 samples"),
        (
            {"high_samples": 7},
            "high_samples is 7; required: at least low_samples and one optimizer window, 8",
        ),
        (
            {"high_bytes": 671},
            "high_bytes is 671; required: at least the largest optimizer window, 672 bytes",
        ),
    ],
)
def test_marks_that_hold_no_window_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ProducerConfig(**fields).watermarks(8, 672)


def test_bytes_are_left_out_where_they_are_not_known_yet() -> None:
    assert ProducerConfig(high_bytes=1).watermarks(8).high_bytes == 1


def test_defaults_are_valid() -> None:
    assert ConsumerConfig().ahead_batches == 2
