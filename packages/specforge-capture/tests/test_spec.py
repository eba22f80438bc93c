from pathlib import Path
from typing import Any

import pytest

from specforge_capture.spec import resolve_capture_spec
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape, target_revision


def config_of(folder: Path, **sections: Any) -> RunConfig:
    target = {"path": str(folder), **sections.pop("target", {})}
    return RunConfig.model_validate({"target": target, "data": {"train": "rows.jsonl"}, **sections})


def test_defaults_follow_the_checkpoint(qwen3_folder: Path) -> None:
    spec = resolve_capture_spec(config_of(qwen3_folder), read_target_shape(qwen3_folder), "hash")
    assert (spec.method, spec.layer_ids, spec.final_state) == ("dspark", (0, 1, 2), True)
    assert (spec.dtype, spec.hidden_size, spec.vocab_size) == ("float32", 32, 320)
    assert (spec.target_revision, spec.tokenizer_hash) == (target_revision(qwen3_folder), "hash")


def test_settings_override_them(qwen3_folder: Path) -> None:
    config = config_of(
        qwen3_folder,
        target={"dtype": "bfloat16", "revision": "mine"},
        draft={"method": "dflash", "target_layer_ids": [1, 3]},
    )
    spec = resolve_capture_spec(config, read_target_shape(qwen3_folder), "hash")
    assert (spec.method, spec.layer_ids, spec.final_state) == ("dflash", (1, 3), False)
    assert (spec.dtype, spec.target_revision) == ("bfloat16", "mine")


def test_layers_that_do_not_exist(qwen3_folder: Path) -> None:
    config = config_of(qwen3_folder, draft={"target_layer_ids": [0, 4]})
    with pytest.raises(ValueError, match=r"draft\.target_layer_ids: \[4\] are no layers of a target with 4"):
        resolve_capture_spec(config, read_target_shape(qwen3_folder), "hash")


def test_element_types_that_cannot_be_captured(qwen3_folder: Path) -> None:
    shape = read_target_shape(qwen3_folder)
    object.__setattr__(shape, "dtype", "float8_e4m3fn")
    with pytest.raises(ValueError, match=r"target\.dtype: the checkpoint's float8_e4m3fn"):
        resolve_capture_spec(config_of(qwen3_folder), shape, "hash")
