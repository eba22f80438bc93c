"""Regeneration by SGLang on a CPU. The shipped chats hold what the tiny target answers, greedily."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from specforge_capture.http_client import ServerDown
from specforge_capture.regeneration.journal import partial_path
from specforge_capture.regeneration.run import output_path, regenerate
from specforge_capture.sglang.answer_servers import _places
from specforge_config.run import RunConfig
from specforge_config.store import FileStore

ROOT = Path(__file__).resolve().parents[4]
TARGET = ROOT / "recipes" / "tiny-target"
CHATS = (ROOT / "recipes" / "tiny-chats" / "train.jsonl").read_text().splitlines(keepends=True)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def messages_of(output: Path) -> list[Any]:
    return [json.loads(line)["messages"] for line in output.read_text().splitlines()]


def expected(rows: int) -> list[Any]:
    return [json.loads(line)["messages"] for line in CHATS[:rows]]


@pytest.fixture(scope="module")
def address(serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """A running server; this one also captures, which it does beside what others ask of it."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "store").mkdir()
    with serve(folder, FileStore(kind="files", folder=str(folder / "store"))) as server:
        yield server.client.url.removeprefix("http://")


@pytest.fixture
def recipe(address: str, tmp_path: Path) -> Callable[..., RunConfig]:
    """Makes a run that answers a few of the shipped chats by the running server."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(CHATS[:12]))

    def make(
        target: Path = TARGET, dtype: str = "float32", max_length: int = 1024, **settings: Any
    ) -> RunConfig:
        regeneration = {"prompts": str(prompts), "output": str(tmp_path / "answers.jsonl"), "batch_size": 4}
        return RunConfig.model_validate({
            "target": {"path": str(target), "dtype": dtype, "backend": "sglang"},
            "data": {"train": "unused.jsonl", "max_length": max_length},
            "regeneration": {**regeneration, "servers": [address], **settings},
            "deployment": {"trainer": {"device": "cpu"}},
        })  # fmt: skip

    return make


def test_servers_give_the_targets_own_answers_interrupted_or_not(recipe: Callable[..., RunConfig]) -> None:
    def stopped(done: int, total: int, tokens: int) -> None:
        if done >= 3:
            raise KeyboardInterrupt

    config = recipe()
    with pytest.raises(KeyboardInterrupt):
        regenerate(config, stopped)
    assert 3 <= len(partial_path(output_path(config)).read_text().splitlines()) - 1 < 12
    manifest, before = regenerate(config)
    assert not before
    assert messages_of(output_path(config)) == expected(12)
    assert manifest["engine"] == "sglang 0.5.18"
    assert (manifest["answered"], manifest["length_limited"], manifest["inexact"]) == (12, 0, 0)
    with pytest.raises(ValueError, match="backend: 'sglang' there, None now"):
        regenerate(config.model_copy(update={"target": config.target.model_copy(update={"backend": "hf"})}))


def test_answers_at_the_limit_and_sampled_ones_are_counted(recipe: Callable[..., RunConfig]) -> None:
    manifest, _ = regenerate(recipe(max_new_tokens=5, max_prompts=6))
    assert (manifest["length_limited"], manifest["answer_tokens"]) == (6, 30)
    config = recipe(temperature=1.5, top_p=0.9, output=str(output_path(recipe())) + ".sampled")
    manifest, _ = regenerate(config)
    assert manifest["answered"] == 12
    assert messages_of(output_path(config)) != expected(12)


def test_servers_of_another_target_are_refused(recipe: Callable[..., RunConfig], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in TARGET.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    changed = json.loads((other / "config.json").read_text()) | {"rope_theta": 1234.0}
    (other / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"serves .*tiny-target, another model than target\.path, .*other"):
        regenerate(recipe(target=other))
    with pytest.raises(ValueError, match=r"computes in float32, required bfloat16: set target\.dtype"):
        regenerate(recipe(dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"takes \d+ tokens, required 4000: lower data\.max_length"):
        regenerate(recipe(max_length=4000))
    with pytest.raises(ServerDown, match=r"http://127\.0\.0\.1:1: ConnectionRefusedError"):
        regenerate(recipe(servers=["127.0.0.1:1"]))


def test_gpus_are_cut_into_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _places(1) == ["0", "1", "2"]
    assert _places(2) == ["0,1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-a,2")
    assert _places(1) == ["7", "GPU-a", "2"]
    with pytest.raises(ValueError, match=r"engine\.tp_size is 4; required: at most .*, 3"):
        _places(4)


RECIPE = f"""\
target: {{path: {TARGET}, dtype: float32, backend: sglang}}
data: {{train: answers.jsonl, max_length: 1024}}
regeneration: {{prompts: prompts.jsonl, output: answers.jsonl, batch_size: 1}}
deployment: {{trainer: {{device: cpu}}}}
"""
ROWS = 16


def test_neither_a_killed_server_nor_a_killed_command_loses_an_answer(
    sglang_python: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "prompts.jsonl").write_text("".join(CHATS[:ROWS]))
    output = tmp_path / "answers.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [str(sglang_python), "-m", "specforge_capture.cli", "regenerate", "recipe.yaml", *overrides]
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def server_of(process: subprocess.Popen[str], rows: int) -> int:
        """Its server's process group, once so many rows are there."""
        deadline = time.monotonic() + 300
        while not partial_path(output).exists() or partial_path(output).read_text().count("\n") <= rows:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (group,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return int(group)

    process = start("engine.extra.quantization=none_such")
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 1, text
    assert "the SGLang server ended with code" in text
    assert "none_such" in text, "in the end of its log"
    assert "nothing was answered yet" in text

    process = start()
    os.killpg(server_of(process, 2), signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1, text
    assert "the SGLang server ended with code -9; the end of answers.jsonl.server0.log" in text
    assert "keeps what is done: the same command goes on" in text
    kept = partial_path(output).read_text().count("\n") - 1
    assert 2 <= kept < ROWS, "stopped in the midst"

    process = start()
    group = server_of(process, kept + 2)
    process.kill()
    process.communicate()
    assert partial_path(output).read_text().count("\n") - 1 < ROWS, "killed in the midst"
    deadline = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            break
        assert time.monotonic() < deadline, "the server outlives the command"
        time.sleep(0.1)

    process = start()
    text, _ = process.communicate(timeout=400)
    assert process.returncode == 0, text
    assert messages_of(output) == expected(ROWS)
