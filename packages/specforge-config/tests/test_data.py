from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.data import DataConfig


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"train": []}, "train is empty"),
        ({"train": ["a", "b", "a"]}, "train lists a twice"),
        ({"train": ["a", "b"], "sha256": "0" * 64}, "sha256 is set with 2 files in train"),
        ({"train": "a", "sha256": "xyz"}, "String should match pattern"),
        (
            {"train": "a", "format": "tokens", "thinking": "drop"},
            "thinking is set, but rows of format tokens",
        ),
        ({"train": "a", "format": "text", "enable_thinking": False}, "enable_thinking is set, but"),
        ({"train": "a", "format": "text", "chat_template": "x.jinja"}, "chat_template is set, but"),
        ({"train": "a", "prompt_seed": -1}, "greater than or equal to 0"),
        ({"train": "a", "max_length": 0}, "greater than 0"),
    ],
)
def test_unusable_data_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(fields)
    assert fault in str(caught.value)


def test_one_file_needs_no_list() -> None:
    one = DataConfig.model_validate({"train": "a", "sha256": "0" * 64, "thinking": "drop"})
    assert one.train == ("a",)
    assert DataConfig.model_validate({"train": ["a", "b"]}).train == ("a", "b")
