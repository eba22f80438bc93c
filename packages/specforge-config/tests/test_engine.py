from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.engine import EngineConfig


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"tp_size": 4, "dp_size": 3}, "dp_size is 3, tp_size is 4"),
        ({"tp_size": 4, "ep_size": 8}, "ep_size is 8, tp_size is 4"),
        (
            {"context_length": 64, "max_total_tokens": 32},
            "max_total_tokens is 32; required: at least context_length",
        ),
        ({"extra": {"tp_size": 2}}, "extra.tp_size is set; required: engine.tp_size"),
        ({"mem_fraction_static": 1.0}, "less than 1"),
    ],
)
def test_fields_that_disagree_are_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EngineConfig.model_validate(fields)
    assert fault in str(caught.value)


def test_further_arguments_keep_their_types() -> None:
    engine = EngineConfig.model_validate(
        {"tp_size": 8, "ep_size": 4, "extra": {"a": True, "b": 1, "c": 0.5, "d": "x"}}
    )
    assert [type(value) for value in engine.extra.values()] == [bool, int, float, str]
