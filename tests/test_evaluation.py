"""`specforge-launch evaluate` on an exported draft and the tiny target: what is counted and written."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from specforge_config.loading import load_run
from specforge_launch.drafts import shape_of
from specforge_launch.evaluation import Source, measure_draft
from specforge_launch.resolve import resolve
from specforge_train.export.sglang import export_sglang
from specforge_train.registry import get_method

RECIPES = Path(__file__).parents[1] / "recipes"
TARGET = RECIPES / "tiny-target"


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported draft of random weights."""
    resolved = resolve(load_run(RECIPES / "quickstart.yaml"))
    shape = shape_of(resolved)
    model = get_method("dspark").build(shape)
    model.init_weights(0)
    return export_sglang(model.state_dict(), shape, tmp_path_factory.mktemp("draft") / "export")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Five single questions, and a chat of two turns."""
    folder = tmp_path_factory.mktemp("prompts")
    questions = [{"turns": [f"What is {n} plus {n + 1}?"]} for n in range(5)]
    chat = [{"turns": ["What is two plus two?", "And twice that?"]}]
    for name, rows in (("questions", questions), ("chat", chat)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "questions.jsonl"), str(folder / "chat.jsonl")


@pytest.fixture(scope="module")
def source(draft: Path, prompts: tuple[str, ...]) -> Source:
    return Source(str(draft), ("evaluation.max_new_tokens=12",), None, str(TARGET), prompts)


def without_times(result: dict) -> dict:
    """What must not depend on who measured."""
    timed = {"seconds_speculative", "seconds_plain", "speedup", "workers"}
    rows = [{key: value for key, value in row.items() if key not in timed} for row in result["sets"]]
    kept = {key: value for key, value in result.items() if key not in timed}
    return {**kept, "sets": rows}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a nested value holds, by its place."""
    if not isinstance(value, (dict, list)):
        yield path, value
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, f"{path}/{key}")


@pytest.fixture(scope="module")
def measured(source: Source) -> dict:
    seen = []
    result = measure_draft(source, progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 12)
    assert seen[-1] == (12, 12)
    return result


def test_every_set_is_measured_at_every_temperature(measured: dict) -> None:
    rows = {(row["name"], row["temperature"]): row for row in measured["sets"]}
    assert set(rows) == {(name, t) for name in ("questions", "chat") for t in (0.0, 1.0)}
    assert [rows["chat", t]["prompts"] for t in (0.0, 1.0)] == [2, 2]  # both turns
    for (_, temperature), row in rows.items():
        assert 1 <= row["tau"] <= 8
        assert row["speedup"] > 0
        identical = (row["lossless_identical"], row["lossless_total"])
        assert identical == ((row["prompts"],) * 2 if temperature == 0 else (None, None))
    greedy = [rows[name, 0.0] for name in ("questions", "chat")]
    assert measured["lossless_identical"] == measured["lossless_total"] == 7
    assert measured["tokens"] == sum(row["tokens"] for row in greedy)
    judged = sum(row["count"] for row in measured["calibration"]["bins"])
    assert judged >= sum(rows[name, 1.0]["rounds"] for name in ("questions", "chat"))
    assert measured["calibration"]["decoding_temperature"] == 1.0


def test_several_processes_measure_the_same(source: Source, measured: dict) -> None:
    found, wanted = (dict(leaves(without_times(one))) for one in (measure_draft(source, workers=2), measured))
    assert found == pytest.approx(wanted, rel=1e-6), "float sums in another order aside"


def test_ctrl_c_keeps_what_was_decoded(source: Source, measured: dict) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    found = measure_draft(source, progress=interrupt)
    decoded, planned = found["conversations"]["decoded"], found["conversations"]["planned"]
    assert 0 < decoded < planned == measured["conversations"]["decoded"]
    first = measured["sets"][0]
    assert len(found["sets"]) == 1
    assert found["sets"][0].items() >= {key: first[key] for key in ("name", "temperature")}.items()
    assert found["tokens"] <= first["tokens"]


def test_the_command_writes_a_record_and_a_picture(
    source: Source, call: Callable[..., str], tmp_path: Path
) -> None:
    files = [argument for path in source.prompts for argument in ("--prompts", path)]
    common = ["evaluate", source.source, *source.overrides, "--target", str(TARGET), *files]
    text = call(*common, "--temperature", "0.7", "--output", str(tmp_path / "measured"))
    assert "questions" in text
    assert "0.7" in text
    record = json.loads((tmp_path / "measured" / "evaluation.json").read_text())
    assert [row["temperature"] for row in record["sets"]] == [0.7, 0.7]
    picture = matplotlib.image.imread(tmp_path / "measured" / "evaluation.png")
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.02  # something is drawn


def test_a_draft_outside_of_a_run_needs_its_target(draft: Path) -> None:
    with pytest.raises(ValueError, match="lies in no run's folder: name its target"):
        measure_draft(Source(str(draft)))
