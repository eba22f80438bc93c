"""`specforge-launch export --check` on an exported folder, alone and beside its target."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_drafts import TARGET, export_random

from specforge_launch import cli
from specforge_launch.drafts import check_folder


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft for the tiny target."""
    folder = tmp_path_factory.mktemp("draft") / "export"
    export_random((), folder, "sglang")
    return folder


def changed(folder: Path, copy: Path, **fields: Any) -> Path:
    """A copy whose `config.json` has other fields, without the weights of a target."""
    copy.mkdir()
    for file in folder.iterdir():
        if folder != TARGET or file.suffix != ".safetensors":
            shutil.copy(file, copy)
    config = json.loads((folder / "config.json").read_text()) | fields
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def test_a_folder_is_checked_alone_and_with_its_target(draft: Path, call: Callable[..., str]) -> None:
    assert "complete" in call("export", str(draft), "--check")
    assert "complete" in call("export", str(draft), "--check", "--target", str(TARGET))


def test_an_exported_draft_is_only_checked(draft: Path) -> None:
    with pytest.raises(
        ValueError, match="is an exported draft; required: its run's folder or recipe, or --check"
    ):
        cli.export(str(draft))
    with pytest.raises(ValueError, match="--output: not used by the check of an exported draft"):
        cli.export(str(draft), check=True, output=draft)
    with pytest.raises(ValueError, match="seed=1: an exported draft has no settings"):
        cli.export(str(draft), ["seed=1"], check=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 2048}, "vocab_size is 1024, required 2048"),
        ({"hidden_size": 256}, "hidden_size is 128, required 256"),
        ({"num_hidden_layers": 6}, "num_target_layers is 4, required 6"),
    ],
)
def test_another_target_is_refused(draft: Path, tmp_path: Path, fields: dict[str, int], message: str) -> None:
    target = changed(TARGET, tmp_path / "target", **fields)
    with pytest.raises(ValueError, match=f"is a draft for another target:\n  {message}"):
        check_folder(draft, str(target))


def test_a_mask_token_that_ends_text_is_refused(draft: Path, tmp_path: Path) -> None:
    config = json.loads((draft / "config.json").read_text())
    section = config["dflash_config"] | {"mask_token_id": 2}
    masked = changed(draft, tmp_path / "draft", dflash_config=section)
    check_folder(masked, None)
    with pytest.raises(ValueError, match="mask_token_id is 2, an end-of-sequence token"):
        check_folder(masked, str(TARGET))


def test_a_larger_tokenizer_is_refused(draft: Path, tmp_path: Path) -> None:
    target = changed(TARGET, tmp_path / "target")
    path = target / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({f"more-{i}": i for i in range(len(vocabulary), 1025)})
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match=r"has 1025 tokens, required at most 1024"):
        check_folder(draft, str(target))
