"""Whole colocated runs through the command: results, two nodes against one rank, interruption and resume."""

import fcntl
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Ended, Launched, require_no_process

from specforge_capture.prompts.cache import cache_key
from specforge_config.loading import load_run
from specforge_launch.resolve import resolve
from specforge_train.weights import read_weights

Launch = Callable[..., Launched]
STEPS, BATCH = 48, 4


@pytest.fixture(scope="module")
def whole(launch: Launch) -> Ended:
    """One rank, from start to end."""
    ended = launch("whole").end()
    assert ended.code == 0, ended
    return ended


def test_a_run_leaves_a_measured_summary_and_shows_it(whole: Ended) -> None:
    summary = whole.summary
    assert summary["tau_untrained"] >= 1.0
    assert summary["tau_trained"] >= 1.0
    assert len(summary["accept_by_slot"]) == 3
    assert summary["lossless_identical"] == summary["lossless_total"] == 2
    assert summary["samples_per_s"] > 0
    shares = [summary[f"share_{part}"] for part in ("capture", "train", "bubble")]
    assert all(0 < share < 1 for share in shares)
    assert sum(shares) == pytest.approx(1.0, abs=0.02)
    assert summary["steps"] == STEPS
    assert f"{summary['tau_trained']:.2f} tokens a round" in whole.out
    assert "2 of 2 greedy outputs identical to the target's own" in whole.out
    for path in summary["paths"].values():
        assert Path(path).exists(), path


def test_a_run_learns_and_records_how(whole: Ended) -> None:
    rows = whole.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    first, last = (sum(row["loss"] for row in part) for part in (rows[:8], rows[-8:]))
    assert last < 0.95 * first
    assert [row["step"] for row in whole.rows("eval/tau")] == [20, 40]
    assert "<svg" in (whole.folder / "report.html").read_text()


def test_an_epoch_gives_each_prompt_once_and_leaves_its_tail_out(whole: Ended) -> None:
    for epoch in range(4):
        steps = whole.samples()[12 * epoch : 12 * (epoch + 1)]
        samples = [sample for _, part in steps for sample in part]
        assert [sample[:2] for sample in samples] == [[epoch, position] for position in range(48)]
        assert len({sample[2] for sample in samples}) == 48


def test_a_run_that_has_finished_is_not_done_again(launch: Launch, whole: Ended) -> None:
    before = whole.summary
    again = launch("whole").end()
    assert again.code == 0
    assert "finished before" in again.out
    assert f"{before['tau_trained']:.2f} tokens a round" in again.out
    assert again.summary == before


def test_checkpoint_and_export_measure_as_the_run_did(whole: Ended, call: Callable[..., str]) -> None:
    measured = json.loads(call("evaluate", str(whole.folder), "--json"))
    assert measured["tau"] == whole.summary["tau_trained"]
    exported = json.loads(call("evaluate", str(whole.folder / "export"), "--json"))
    assert exported["lossless_identical"] == exported["lossless_total"] == 2
    assert exported["tau"] == pytest.approx(measured["tau"], rel=0.2)  # weights rounded to bfloat16


def test_exporting_again_gives_the_same_draft(whole: Ended, call: Callable[..., str], tmp_path: Path) -> None:
    assert "complete" in call("export", str(whole.folder), "--check")
    call("export", str(whole.folder), "--checkpoint", "step-000048", "--output", str(tmp_path / "draft"))
    weights, expected = (read_weights(folder) for folder in (tmp_path / "draft", whole.folder / "export"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert "complete" in call("export", str(whole.folder / "export"), "--check")
    call("export", str(whole.folder), "--format", "speculators", "--verifier", "some/target")
    assert "complete" in call("export", str(whole.folder), "--format", "speculators", "--check")
    exported = whole.folder / "export-speculators"
    described = json.loads((exported / "config.json").read_text())["speculators_config"]["verifier"]
    assert described == {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]}
    weights = read_weights(exported)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_prepare_tells_what_is_trained_on(whole: Ended, call: Callable[..., str]) -> None:
    text = call("prepare", str(whole.folder / "resolved.yaml"), "data.max_length=64")
    assert "50: 50 kept, 0 dropped" in text
    assert "<|im_start|>assistant" in text


def test_two_nodes_train_as_one_rank_and_wait_for_slow_prompts(
    launch: Launch, whole: Ended, tmp_path: Path
) -> None:
    """Two launchers of one rank each meet at a rendezvous; a collective may wait less than prompts take."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        "deployment.trainer.nnodes=2",
        f"deployment.trainer.rendezvous=127.0.0.1:{port}",
        "deployment.trainer.timeout_seconds=10",
        f"data.cache_dir={tmp_path}",
    ]
    # What a start of four ranks left, whose last one failed.
    errors = whole.folder.parent / "nodes" / "errors"
    errors.mkdir(parents=True)
    (errors / "rank-3.json").write_text(json.dumps({"rank": 3, "peer": False, "time": time.time()}))
    config = load_run(whole.folder / "resolved.yaml", [f"data.cache_dir={tmp_path}"])
    facts = resolve(config)
    key = cache_key(config.data, facts.renderer, facts.target.vocab_size, facts.mask_token_id)
    with (tmp_path / f"{key}.lock").open("a+") as builder:
        fcntl.flock(builder, fcntl.LOCK_EX)
        first, second = (launch("nodes", *nodes, "--node-rank", str(node)) for node in (0, 1))
        first.wait_for(lambda event: event["stage"] == "prompts")
        time.sleep(12)
        assert [event["stage"] for event in first.events()] == ["prompts"]
    both, other = first.end(), second.end()
    assert both.code == 0, both
    assert other.code == 0, other
    for name in ("loss", "loss/ce", "loss/l1", "loss/confidence", "tau_estimate", "lr"):
        found, expected = (torch.tensor([row[name] for row in run.rows()]) for run in (both, whole))
        torch.testing.assert_close(found[:12], expected[:12], rtol=2e-6, atol=2e-6)
        # Adam divides by small numbers: rounding grows with every step.
        torch.testing.assert_close(found[12:].mean(), expected[12:].mean(), rtol=2e-2, atol=0)
    for rank in (0, 1):
        halves = [part[2 * rank : 2 * rank + 2] for _, part in whole.samples()]
        assert [part for _, part in both.samples(rank)] == halves
    assert both.summary["tau_trained"] == pytest.approx(whole.summary["tau_trained"], rel=0.3)


def test_ctrl_c_saves_and_the_resumed_run_is_the_uninterrupted_one(launch: Launch, whole: Ended) -> None:
    run = launch("interrupted")
    halted = run.halt(2)
    intruder = launch("interrupted").end()
    assert intruder.code == 2
    assert f"in use by the run of process {run.process.pid}" in intruder.err
    run.interrupt(halted)
    stopped = run.end()
    assert stopped.code == 130, stopped
    assert "the same command goes on from there" in stopped.out
    require_no_process(stopped.folder)
    done = [step for step, _ in stopped.samples()]
    assert 2 <= len(done) < STEPS
    assert not (stopped.folder / "summary.json").exists()

    resumed = launch("interrupted", "--resume", "required").end()
    assert resumed.code == 0, resumed
    assert resumed.samples() == whole.samples()
    exact = ("loss", "lr", "grad_norm", "tau_estimate", "accept/0")
    assert [[row[name] for name in exact] for row in resumed.rows()] == [
        [row[name] for name in exact] for row in whole.rows()
    ]
    weights, expected = read_weights(resumed.folder), read_weights(whole.folder)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for name in ("tau_untrained", "tau_trained", "accept_by_slot"):
        assert resumed.summary[name] == whole.summary[name]


def test_another_plan_is_not_resumed(launch: Launch, whole: Ended) -> None:
    summary = whole.summary
    other = launch("whole", "data.prompt_seed=7", "data.group_by_length=5", "training.max_steps=50").end()
    assert other.code == 2, other
    assert "prompt_seed" in other.err
    assert "group_by_length" in other.err
    assert "Traceback" not in other.err
    assert whole.summary == summary
    assert "finished before" in launch("whole").end().out
