"""Kernels and definition, trained side by side: what the script measures, and what it makes of it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("loss_curve")


def curves(fast: list[float]) -> dict[str, object]:
    facts = {"data": "chain", "dtype": "torch.bfloat16", "attention": "triton"}
    sizes = {"hidden_size": 64, "vocab_size": 100}
    return facts | sizes | {"reference": [4.0 * 0.95**step for step in range(30)], "fast": fast}


def judged(script: ModuleType, tmp_path: Path, result: dict[str, object]) -> int:
    written = tmp_path / "curves.json"
    written.write_text(json.dumps(result))
    arguments = ["--read", str(written), "--picture", str(tmp_path / "curves.png")]
    return script.main(script.parse(arguments))


def test_curves_that_agree_are_drawn_and_pass(script: ModuleType, tmp_path: Path, capsys) -> None:
    fast = [4.0 * 0.95**step for step in range(30)]
    fast[12] *= 1.004
    assert judged(script, tmp_path, curves(fast)) == 0
    assert "unsmoothed: largest 4.00e-03 at step 12, last 0.00e+00" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_one_step_beyond_the_limit_fails(script: ModuleType, tmp_path: Path, capsys) -> None:
    fast = [4.0 * 0.95**step for step in range(30)]
    fast[12] *= 1.006
    assert judged(script, tmp_path, curves(fast)) == 1
    assert "within 0.50%: no; learned: yes" in capsys.readouterr().out
    fast[12] = float("nan")
    assert judged(script, tmp_path, curves(fast)) == 1


def test_a_draft_that_learns_nothing_proves_nothing(script: ModuleType, tmp_path: Path, capsys) -> None:
    result = curves([4.0] * 30) | {"reference": [4.0] * 30}
    assert judged(script, tmp_path, result) == 1
    assert "within 0.50%: yes; learned: no" in capsys.readouterr().out


@pytest.mark.slow
def test_both_paths_train_through_the_interpreter(tmp_path: Path) -> None:
    written = tmp_path / "curves.json"
    sizes = [
        "--data",
        "chain",
        "--hidden",
        "32",
        "--vocabulary",
        "100",
        "--anchors",
        "3",
        "--max-length",
        "20",
    ]
    command = [sys.executable, str(ROOT / "scripts" / "loss_curve.py"), "--device", "cpu", "--steps", "2"]
    done = subprocess.run(
        [*command, *sizes, "--json", str(written)], capture_output=True, text=True, timeout=280
    )
    # Two steps teach nothing, which the script says.
    assert done.returncode == 1, done.stderr
    assert "within 0.50%: yes; learned: no" in done.stdout
    result = json.loads(written.read_text())
    assert result["attention"] == "triton"
    assert result["reference"] == pytest.approx(result["fast"], rel=1e-5)
    assert result["reference"][0] > 1
