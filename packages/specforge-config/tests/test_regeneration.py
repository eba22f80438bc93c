from typing import Any

import pytest
from pydantic import ValidationError

from specforge_config.regeneration import RegenerationConfig
from specforge_config.run import RunConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ["a", "a"]}, "prompts lists a twice"),
        ({"top_p": 0.9}, "top_p is 0.9, but temperature 0 is greedy"),
        ({"servers": ["http://a:1"]}, "servers: 'http://a:1'; required: host:port"),
        ({"servers": ["a:1", "a:1"]}, "servers lists a:1 twice"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RegenerationConfig.model_validate(settings)


def test_prompts_that_are_measured_on_are_not_answered_for_training() -> None:
    sections = {"regeneration": {"prompts": "p"}, "evaluation": {"prompts": "p"}}
    with pytest.raises(
        ValidationError, match=r"evaluation\.prompts holds p, as does regeneration\.prompts; .*held-out"
    ):
        RunConfig.model_validate({"target": {"path": "t"}, "data": {"train": "a"}} | sections)


def test_servers_answer_for_sglang_alone() -> None:
    sections = {"target": {"path": "t"}, "data": {"train": "a"}, "regeneration": {"servers": ["a:1"]}}
    with pytest.raises(ValidationError, match=r"regeneration\.servers is set, but target\.backend hf"):
        RunConfig.model_validate(sections)
    sections["target"]["backend"] = "sglang"
    assert RunConfig.model_validate(sections).regeneration.servers == ("a:1",)
