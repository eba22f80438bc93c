import json
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from specforge_launch import cli
from specforge_launch import recipe as recipes

LIGHT = """
import sys
from specforge_launch import cli
sys.argv[1:] = {arguments!r}
try:
    cli.main()
except SystemExit as exit:
    heavy = [name for name in ("torch", "transformers", "matplotlib", "pyarrow") if name in sys.modules]
    assert not heavy, heavy
    raise
"""


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["specforge-launch", *arguments])
    width = int(os.environ.get("COLUMNS", "200"))
    monkeypatch.setattr(cli, "out", cli.Console(width=width))
    monkeypatch.setattr(cli, "err", cli.Console(width=width, stderr=True))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["validate", "RECIPE"],
        ["plan", "RECIPE", "--json"],
        ["recipes"],
        ["schema"],
        ["run", "--help"],
    ],
)
def test_what_needs_no_model_imports_no_torch(recipe: Path, arguments: list[str]) -> None:
    filled = [str(recipe) if argument == "RECIPE" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT.format(arguments=filled)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_plan_prints_json_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert call(monkeypatch, "plan", str(recipe), "training.max_steps=3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total_steps"] == 3


def test_plan_shows_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert call(monkeypatch, "plan", str(recipe)) == 0
    text = capsys.readouterr().out
    assert "plan of small" in text
    assert "optimizer states" in text


def test_validate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    assert call(monkeypatch, "validate", str(recipe)) == 0
    assert "valid" in capsys.readouterr().out
    assert call(monkeypatch, "validate", str(recipe), "tracking.trackers=[wandb]") == 0
    assert "not implemented yet: tracking.trackers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing"], "no recipe 'nothing'"),
        (["plan", "RECIPE", "optimzer.lr=1"], "did you mean 'optimizer'"),
        (
            ["run", "RECIPE", "training.global_batch_size=3", "deployment.trainer.nproc_per_node=2"],
            "cannot be shared by 2",
        ),
        (["run", "RECIPE", "data.train=missing.jsonl"], "data.train: no file"),
        (["run", "RECIPE", "--node-rank", "3"], "--node-rank is 3"),
        (["run", "RECIPE", "--resume", "required"], "holds no checkpoint"),
        (["run", "RECIPE", "tracking.trackers=[wandb]"], "not implemented yet: tracking.trackers"),
        (["evaluate", "nothing"], "no recipe 'nothing'"),
        (["export", "RECIPE", "--checkpoint", "step-000007"], "no checkpoint step-000007"),
        (["export", "RECIPE", "--target", "x"], "--target: not used by a run"),
        (["export", "RECIPE", "--verifier", "x"], "--verifier: not used by an export for SGLang"),
        (["report", "RECIPE"], "no metrics.jsonl"),
    ],
)
def test_a_users_error_is_one_message_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert (
        call(monkeypatch, *(str(recipe) if argument == "RECIPE" else argument for argument in arguments)) == 2
    )
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


def test_a_folder_with_a_checkpoint_is_not_started_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / "checkpoints" / "step-000004").mkdir(parents=True)
    assert call(monkeypatch, "run", str(recipe), "--resume", "never") == 2
    assert "holds a checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100, 120])
def test_recipes_are_listed_by_name_with_what_they_do_below(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert call(monkeypatch, "recipes") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if not line.startswith("  ")] == list(recipes.shipped())
    assert max(map(len, lines)) <= width
    for path in recipes.shipped().values():
        below = lines[lines.index(path.stem) + 1 :]
        text = " ".join(line.strip() for line in takewhile(lambda line: line.startswith("  "), below))
        assert text == recipes.summary(path)


def test_recipes_are_listed_shown_and_copied(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "recipes") == 0
    assert "quickstart" in capsys.readouterr().out
    assert call(monkeypatch, "recipes", "show", "quickstart") == 0
    shown = capsys.readouterr().out
    assert call(monkeypatch, "recipes", "copy", "quickstart", str(tmp_path / "mine")) == 0
    assert (tmp_path / "mine" / "quickstart.yaml").read_text() == shown


def test_the_schema_describes_every_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["properties"]["seed"]["description"]


def test_a_target_that_is_no_gguf_file_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert call(monkeypatch, "run", str(recipe), "target.gguf_file=config.json") == 2
    assert "config.json is no GGUF file" in capsys.readouterr().err
