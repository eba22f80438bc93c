import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specforge_capture.regeneration.journal import partial_path

ROOT = Path(__file__).resolve().parents[4]
COMMAND = [sys.executable, "-m", "specforge_capture.cli", "regenerate"]
ROWS = 32
"""Enough that a busy machine sees it in the midst of them."""
RECIPE = f"""\
target: {{path: {ROOT}/recipes/tiny-target, dtype: float32}}
data: {{train: answers.jsonl, max_length: 256}}
regeneration: {{prompts: prompts.jsonl, output: answers.jsonl, max_new_tokens: 60, batch_size: 1}}
deployment: {{trainer: {{device: cpu}}}}
"""


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    # A shell's background job, of which these tests may be part, ignores Ctrl-C, and so would its children.
    return subprocess.Popen(
        ["env", "--default-signal=INT", *COMMAND, "recipe.yaml", *overrides],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_what_is_done_is_kept_and_the_command_goes_on(end: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    chats = (ROOT / "recipes" / "tiny-chats" / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text("".join(chats[:ROWS]))
    output = tmp_path / "answers.jsonl"
    process = start(tmp_path)
    deadline = time.monotonic() + 120
    while not partial_path(output).exists() or partial_path(output).read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(end)
    _, error = process.communicate(timeout=60)
    if end == signal.SIGINT:
        assert process.returncode == 130, error
        assert "keeps what is done" in error
    kept = partial_path(output).read_text().splitlines()
    assert 3 <= len(kept) < ROWS + 1, "stopped in the midst"
    text, error = (again := start(tmp_path)).communicate(timeout=240)
    assert again.returncode == 0, error
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"prompts.jsonl:{n}" for n in range(1, ROWS + 1)]
    assert f"{ROWS}: {ROWS} answered, 0 dropped" in text
    # The shipped chats hold the tiny target's own greedy answers.
    for row, chat in zip(rows, map(json.loads, chats), strict=False):
        if row["finish"] == "stop":
            assert row["messages"] == chat["messages"]


def test_errors_are_one_message_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    process = start(tmp_path, "regeneration.temprature=1")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "regeneration.temperature" in error
    assert "Traceback" not in error
