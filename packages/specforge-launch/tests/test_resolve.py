import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specforge_config.run import RunConfig
from specforge_launch.resolve import resolve

Load = Callable[..., RunConfig]


def test_rows_of_tokens_need_no_tokenizer(load: Load, tmp_path: Path) -> None:
    config = load("draft.mask_token_id=300", f"data.cache_dir={tmp_path / 'cache'}")
    resolved = resolve(config)
    assert resolved.mask_token_id == 300
    prompts = resolved.prompts()
    assert len(prompts) == 40
    assert prompts[0].input_ids.tolist() == [1, 2, 3]
    assert resolved.spec.tokenizer_hash == resolved.renderer.hash
    with pytest.raises(ValueError, match=r"draft\.mask_token_id is unset"):
        resolve(load())


@pytest.mark.parametrize("section", ["data.train", "evaluation.prompts"])
def test_rows_of_text_need_one(load: Load, tmp_path: Path, section: str) -> None:
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ValueError, match=r"target\.path: no tokenizer in .*pre-tokenised rows"):
        resolve(load("draft.mask_token_id=300", f"{section}={tmp_path / 'texts.jsonl'}"))
