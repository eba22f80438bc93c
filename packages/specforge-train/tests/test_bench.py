"""Our steps, as `specforge-kernels bench` finds and times them."""

import json
from pathlib import Path

from specforge_kernels import cli


def test_both_declared_steps_are_timed(tmp_path: Path, capsys) -> None:
    record = tmp_path / "steps.json"
    sizes = ["--tiny", "--device", "cpu", "--seeds", "7", "--at", "50", "--json", str(record)]
    assert cli.main(["bench", *sizes]) == 0
    printed = capsys.readouterr().out
    assert "lengths of seed 7" in printed
    reports = {report["name"]: report for report in json.loads(record.read_text())}
    assert reports.keys() == {"dspark", "trainer"}
    assert reports["dspark"]["parameters"] == reports["trainer"]["parameters"] > 100_000
    assert all(report["packed"]["over_single"] > 0 for report in reports.values())
