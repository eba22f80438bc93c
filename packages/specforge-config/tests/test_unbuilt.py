from typing import Any

import pytest

from specforge_config.run import RunConfig
from specforge_config.unbuilt import not_implemented

MINIMAL = {"target": {"path": "t"}, "data": {"train": "a"}}


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"draft": {"method": "eagle3"}}, "draft.method=eagle3 (built: dspark)"),
        ({"draft": {"method": "dflash"}}, "draft.method=dflash (built: dspark)"),
        (
            {"draft": {"rope_scaling": {"rope_type": "linear", "factor": 2}}},
            "draft.rope_scaling with rope_type=linear (built: default, yarn)",
        ),
        (
            {"deployment": {"mode": "offline", "features": "f"}},
            "deployment.mode=offline (built: local_colocated, disaggregated)",
        ),
        (
            {"tracking": {"trackers": ["wandb"]}},
            "tracking.trackers=['wandb'] (built: metrics.jsonl, always written)",
        ),
    ],
)
def test_unbuilt_settings_are_named(sections: dict[str, Any], refused: str) -> None:
    config = RunConfig.model_validate(MINIMAL | sections)
    assert not_implemented(config) == [f"not implemented yet: {refused}"]


def test_every_unbuilt_setting_is_named() -> None:
    sections = {"draft": {"method": "eagle3"}, "tracking": {"trackers": ["wandb"]}}
    assert len(not_implemented(RunConfig.model_validate(MINIMAL | sections))) == 2


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"draft": {"rope_scaling": {"type": "yarn", "factor": 2}}},
        {"target": {"path": "t", "backend": "sglang"}},
        {"target": {"path": "t", "backend": "sglang"}, "engine": {"load_format": "dummy"}},
        {"engine": {"load_format": "dummy"}},
        {"target": {"path": "t", "gguf_file": "x.gguf"}},
        {"deployment": {"mode": "disaggregated", "managed": True}},
    ],
)
def test_built_runs_may_start(sections: dict[str, Any]) -> None:
    assert not_implemented(RunConfig.model_validate(MINIMAL | sections)) == []
