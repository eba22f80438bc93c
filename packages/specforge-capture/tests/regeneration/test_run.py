import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specforge_capture.prompts.cache import open_or_build
from specforge_capture.prompts.chat import ChatRenderer, load_tokenizer
from specforge_capture.regeneration.journal import partial_path
from specforge_capture.regeneration.run import output_path, regenerate
from specforge_capture.targets.batch import STRIDE
from specforge_config.data import DataConfig
from specforge_config.run import RunConfig
from specforge_config.target import target_revision

Recipe = Callable[..., RunConfig]
TINY_TARGET = Path(__file__).resolve().parents[4] / "recipes" / "tiny-target"


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(recipe: Recipe) -> None:
    config = recipe(temperature=0.0, top_p=1.0)
    manifest, before = regenerate(config)
    assert not before
    renderer = ChatRenderer(load_tokenizer(config.target.path))
    model: Any = AutoModelForCausalLM.from_pretrained(config.target.path, attn_implementation="eager")
    rows = rows_of(output_path(config))
    assert len(rows) == manifest["rows"] == manifest["answered"] == 9
    for row in rows:
        turns = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for turn, length in zip(turns, row["answer_tokens"], strict=True):
            (ids,) = renderer.tokenize([renderer.render(row["messages"][:turn], generation_prompt=True)])
            output = model.generate(
                torch.tensor([ids]), max_new_tokens=length, do_sample=False, eos_token_id=2, pad_token_id=0
            )
            answer = [token for token in output[0, len(ids) :].tolist() if token != 2]
            assert row["messages"][turn]["content"] == renderer.decode(answer)


def test_neither_the_batch_nor_an_interruption_changes_the_output(recipe: Recipe, tmp_path: Path) -> None:
    whole, _ = regenerate(recipe(batch_size=1))

    def killed(done: int, total: int, tokens: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    config = recipe(batch_size=3, output=str(tmp_path / "other.jsonl"))
    with pytest.raises(KeyboardInterrupt):
        regenerate(config, killed)
    path = partial_path(output_path(config))
    kept = len(path.read_text().splitlines()) - 1
    assert 3 <= kept < 9
    path.write_bytes(path.read_bytes()[:-5])  # as if killed in the midst of a line
    progress: list[tuple[int, int, int]] = []
    resumed, _ = regenerate(config, lambda *event: progress.append(event))
    assert progress[0] == (kept - 1, 9, 0)
    assert progress[-1][:2] == (9, 9)
    assert resumed["sha256"] == whole["sha256"]


def test_the_manifest_says_how_the_answers_were_made(recipe: Recipe) -> None:
    config = recipe()
    written: list[int] = []
    manifest, _ = regenerate(config, lambda done, total, tokens: written.append(tokens))
    assert written == sorted(written)
    assert written[-1] == manifest["answer_tokens"]
    assert 0 < written[1] <= 4 * (STRIDE + 1), "answers count while they are being written"
    rows = rows_of(output_path(config))
    renderer = ChatRenderer(load_tokenizer(config.target.path))
    settings = manifest["settings"]
    assert settings["revision"] == target_revision(config.target.path)
    assert settings["template"] == renderer.hash
    assert (settings["temperature"], settings["top_p"], settings["seed"]) == (1.0, 0.98, 0)
    cut = [row for row in rows if row["finish"] == "length"]
    assert 0 < len(cut) < len(rows), "the test wants answers of both kinds"
    assert all(row["answer_tokens"][-1] == 40 for row in cut)
    assert manifest["length_limited"] == len(cut)
    assert manifest["answer_tokens"] == sum(sum(row["answer_tokens"]) for row in rows)
    assert manifest["answers"] == sum(len(row["answer_tokens"]) for row in rows)
    again, before = regenerate(config)
    assert (again, before) == (manifest, True)


def test_another_seed_gives_other_answers(recipe: Recipe, tmp_path: Path) -> None:
    first, _ = regenerate(recipe(max_prompts=3))
    other, _ = regenerate(recipe(max_prompts=3, seed=1, output=str(tmp_path / "other.jsonl")))
    assert first["rows"] == other["rows"] == 3
    assert first["sha256"] != other["sha256"]


def test_the_answers_can_be_trained_on(recipe: Recipe, tmp_path: Path) -> None:
    # A trained target: random weights write bytes that are no text.
    config = recipe(target=TINY_TARGET, temperature=0.0, top_p=1.0)
    regenerate(config)
    renderer = ChatRenderer(load_tokenizer(config.target.path))
    data = DataConfig(train=(str(output_path(config)),), cache_dir=str(tmp_path / "cache"))
    prompts = open_or_build(data, renderer, vocab_size=1024)
    rows = rows_of(output_path(config))
    assert prompts.report.kept == len(rows)
    # What is supervised are the target's tokens and the end of turn behind a cut answer.
    assert sum(row["exact"] for row in rows) > len(rows) // 2
    found = {
        sample.sample_id: int(sample.loss_mask.sum()) for sample in map(prompts.row, range(len(prompts)))
    }
    for number, row in enumerate(rows, 1):
        if row["exact"]:
            wanted = sum(row["answer_tokens"]) + (row["finish"] == "length")
            assert found[f"answers.jsonl:{number}"] == wanted


def test_rows_that_cannot_be_answered_are_counted(recipe: Recipe, write_rows: Callable[..., Path]) -> None:
    asked = {"messages": [{"role": "user", "content": "hello"}]}
    long = {"messages": [{"role": "user", "content": "think about it " * 100}]}
    prompts = str(write_rows(asked, {"messages": []}, long, asked, name="some.jsonl"))
    manifest, _ = regenerate(recipe(prompts=prompts))
    assert (manifest["rows"], manifest["answered"]) == (4, 2)
    first, second = manifest["dropped"]
    assert first["id"] == "some.jsonl:2"
    assert "non-empty list" in first["reason"]
    assert second["id"] == "some.jsonl:3"
    assert "required less than data.max_length=200" in second["reason"]


def test_under_strict_such_a_row_is_an_error(recipe: Recipe, write_rows: Callable[..., Path]) -> None:
    prompts = str(write_rows({"messages": [{"role": "system", "content": "a"}]}, name="some.jsonl"))
    with pytest.raises(ValueError, match=r"data\.strict: some\.jsonl:1: nothing to answer"):
        regenerate(recipe({"strict": True}, prompts=prompts))


def test_tokens_behind_the_tokenizers_last_have_no_text(recipe: Recipe, tmp_path: Path) -> None:
    config = recipe(max_prompts=2)
    padded: Any = AutoModelForCausalLM.from_pretrained(config.target.path)
    padded.resize_token_embeddings(2048, mean_resizing=False)
    folder = tmp_path / "padded"
    padded.save_pretrained(folder)
    tokenizer = load_tokenizer(config.target.path)
    tokenizer.save_pretrained(folder)
    assert len(tokenizer) < 2048 // 4, "most of what is sampled has no text"
    manifest, _ = regenerate(recipe(max_prompts=2, target=folder))
    assert manifest["answered"] == manifest["inexact"] == 2


def test_rows_of_user_turns_alone_are_prompts(recipe: Recipe, write_rows: Callable[..., Path]) -> None:
    config = recipe(
        prompts=str(write_rows({"turns": ["one", "two"]}, name="turns.jsonl")), temperature=0.0, top_p=1.0
    )
    regenerate(config)
    (row,) = rows_of(output_path(config))
    assert row["messages"][0] == {"role": "user", "content": "one"}
    assert row["messages"][1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ()}, "regeneration.prompts is empty"),
        ({"prompts": "nowhere.jsonl"}, "nowhere.jsonl: no such prompt file"),
    ],
)
def test_without_prompts_nothing_starts(recipe: Recipe, change: dict[str, Any], message: str) -> None:
    config = recipe(**change)
    with pytest.raises(ValueError, match=message):
        regenerate(config)
    assert not partial_path(output_path(config)).exists()


@pytest.mark.skipif(any(metadata.distributions(name="sglang")), reason="SGLang is installed here")
def test_without_sglang_its_answers_are_refused(recipe: Recipe) -> None:
    config = recipe()
    target = config.target.model_copy(update={"backend": "sglang"})
    with pytest.raises(ValueError, match=r"SGLang is not installed; .*or regeneration\.servers"):
        regenerate(config.model_copy(update={"target": target}))


def test_random_weights_answer_nothing(recipe: Recipe) -> None:
    config = recipe()
    engine = config.engine.model_copy(update={"load_format": "dummy"})
    with pytest.raises(ValueError, match=r"engine\.load_format is dummy; required: auto"):
        regenerate(config.model_copy(update={"engine": engine}))
