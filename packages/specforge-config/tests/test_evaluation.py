import pytest
from pydantic import ValidationError

from specforge_config.evaluation import EvaluationConfig


def test_one_file_needs_no_list() -> None:
    assert EvaluationConfig.model_validate({"prompts": "a", "interval": 5}).prompts == ("a",)


def test_an_interval_needs_prompts() -> None:
    with pytest.raises(ValidationError, match="interval is 5, but prompts is empty"):
        EvaluationConfig(interval=5)


def test_prompts_are_listed_once() -> None:
    with pytest.raises(ValidationError, match="prompts lists a twice"):
        EvaluationConfig(prompts=("a", "a"))
