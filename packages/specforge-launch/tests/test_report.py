import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from specforge_launch.report import render, write_report
from specforge_launch.show import summary_rows

SUMMARY = {
    "name": "small",
    "dummy_weights": False,
    "tau_untrained": 1.0312,
    "tau_trained": 3.4567,
    "accept_by_slot": [0.9, 0.7, None],
    "accept_by_slot_untrained": [0.03, 0.0, 0.0],
    "lossless_identical": 7,
    "lossless_total": 8,
    "samples_per_s": 12.34,
    "share_capture": 0.25,
    "share_train": 0.7,
    "share_bubble": 0.05,
    "first_step_seconds": 7.5,
    "startup_seconds": {"launch": 3.0, "target": 4.25, "target/import": 4.0, "first step": 0.25},
    "seconds": 61.4,
    "steps": 20,
    "paths": {"report": "out/report.html"},
}


def rows() -> list[dict[str, Any]]:
    train = [
        {
            "step": step,
            "loss": 2.0 / step,
            "loss/ce": 4.0 / step,
            "loss/l1": 1.0 / step,
            "loss/confidence": 0.5,
            "tau_estimate": 1 + step / 10,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "perf/capture_share": 0.3,
            "perf/train_share": 0.6,
            "perf/bubble_fraction": 0.1,
        }
        for step in range(1, 21)
    ]
    return [*train, {"step": 10, "eval/tau": 2.5, "eval/accept/0": 0.5, "eval/accept/1": 0.25}]


def charts(page: str) -> list[str]:
    return re.findall(r"<svg.*?</svg>", page, flags=re.S)


def test_the_page_holds_its_curves_and_points_to_nothing_outside() -> None:
    page = render(rows(), SUMMARY, "name: small <&>", title="small <run>")
    drawn = charts(page)
    assert len(drawn) == 5
    for chart in drawn:
        ElementTree.fromstring(chart)
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert "small &lt;run&gt;" in page
    assert "name: small &lt;&amp;&gt;" in page
    assert "7 of 8" in page
    tau, slots, *_ = drawn
    assert [text for text in ("1.03", "2.50", "3.46") if text in tau] == ["1.03", "2.50", "3.46"]
    assert "90%" in slots
    assert "3%" in slots


def test_a_run_that_has_not_ended_has_a_page_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows()[0]) + "\n")
    page = write_report(tmp_path).read_text()
    assert "has not ended" in page
    assert len(charts(page)) == 5


def test_a_folder_without_metrics_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)


def test_the_table_says_what_was_measured() -> None:
    table = dict(summary_rows(SUMMARY))
    assert table["acceptance length τ, trained"] == "3.46 tokens a round"
    assert table["acceptance by slot"] == "0.90  0.70  -"
    assert table["lossless"] == "7 of 8 greedy outputs identical to the target's own"
    assert table["a step's time"] == "25% capture / 70% train / 5% bubble"


def test_a_run_without_evaluation_has_a_table_without_it() -> None:
    unmeasured = {**SUMMARY, "tau_untrained": None, "tau_trained": None, "accept_by_slot": None}
    table = dict(summary_rows(unmeasured))
    assert "lossless" not in table
    assert table["samples/s"] == "12.3"
