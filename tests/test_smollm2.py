"""The whole way with a real target, shortened.

SmolLM2-135M answers prompts, a draft is trained on the answers, measured, exported and checked.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "smollm2-135m-dspark-cpu.yaml"
TARGET = ROOT / ".cache" / "smollm2"
# The conversion is kept between test runs.
SAME = [
    f"target.path={TARGET}",
    f"target.cache_dir={ROOT / '.cache' / 'specforge' / 'targets'}",
    "regeneration.prompts=prompts.jsonl",
    "regeneration.output=answers.jsonl",
    "data.train=answers.jsonl",
    "evaluation.prompts=held-out.jsonl",
    "output_dir=out",
]
QUESTIONS = [
    "What is the capital of France?",
    "Tom has 3 apples and buys 5 more. How many apples does he have?",
    "Write one sentence about the sea.",
    "Name three colours.",
]
HELD_OUT = "How many days are in two weeks?"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts; skipped where the target cannot be had."""
    script = [sys.executable, str(ROOT / "scripts" / "fetch_smollm2.py"), "--out", str(TARGET)]
    fetched = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    if fetched.returncode:
        raise pytest.skip.Exception(f"needs SmolLM2: {fetched.stderr.strip()}")
    folder = tmp_path_factory.mktemp("smollm2")
    rows = [{"turns": [question]} for question in QUESTIONS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held-out.jsonl").write_text(json.dumps({"turns": [HELD_OUT]}) + "\n")
    return folder


def call(folder: Path, module: str, *arguments: str) -> str:
    """What a command of ours printed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    return done.stdout


def test_from_prompts_to_an_exported_draft(folder: Path) -> None:
    short = ["regeneration.max_new_tokens=24", "evaluation.max_new_tokens=8", *SAME]
    call(folder, "specforge_capture.cli", "regenerate", str(RECIPE), *short)
    manifest = json.loads((folder / "answers.jsonl.manifest.json").read_text())
    assert (manifest["answered"], manifest["inexact"], manifest["dropped"]) == (4, 0, [])
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert "Paris" in answers[0]["messages"][-1]["content"]
    # Some end with <|im_end|>, which the tokenizer does not name as its end of sequence.
    assert 0 < manifest["length_limited"] < 4
    assert not any("<|im_" in answer["messages"][-1]["content"] for answer in answers)

    train = ["training.global_batch_size=1", "training.max_steps=2", "training.log_every=1", *short]
    call(folder, "specforge_launch.cli", "run", str(RECIPE), *train)
    losses = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["loss"] for row in losses if "loss" in row]
    assert len(steps) == 2
    assert steps[1] < steps[0]
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["lossless_identical"] == summary["lossless_total"] == 1
    assert summary["tau_trained"] >= 1
    assert "complete" in call(folder, "specforge_launch.cli", "export", "out", "--check")
