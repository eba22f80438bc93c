import json
from pathlib import Path

import pytest
import torch

from specforge_train.metrics import JsonLines, StepSums, Window
from specforge_train.parallel import World


def test_ratios_are_formed_after_the_sums(world: World) -> None:
    window = Window()
    for weights, right in ((4.0, 1.0), (1.0, 1.0)):
        sums = StepSums(world)
        for _ in range(2):
            pair = (torch.tensor(right), torch.tensor(weights))
            sums.add({"accuracy": pair}, weights=weights, samples=3, dropped=1)
        totals = sums.reduce(torch.tensor(9.0, dtype=torch.float64))
        head, metrics = totals.read()
        assert head["norm"] == pytest.approx(3.0 / (2 * weights))
        assert float(totals.weights) == 2 * weights
        window.add(head, metrics)
    assert window.ratios() == {"accuracy": pytest.approx(4.0 / 10.0)}
    assert (window.steps, window.sums["samples"], window.sums["dropped"], window.skipped) == (2, 12, 4, 0)


def test_a_step_without_weights_is_counted_and_reports_zero(world: World) -> None:
    sums = StepSums(world)
    sums.add({"loss": (torch.tensor(0.0), torch.tensor(0.0))}, weights=0.0)
    window = Window()
    window.add(*sums.reduce(torch.zeros((), dtype=torch.float64)).read())
    assert window.skipped == 1
    assert window.ratios() == {"loss": 0.0}


def test_json_lines_go_on_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = JsonLines(path, 0)
    for step in (1, 2, 2, 3):
        first.add({"step": step})
        assert path.read_text().endswith("\n"), "a line appears whole, at once"
    first.close()
    with path.open("a") as file:
        file.write('{"step": 2, "torn')
    again = JsonLines(path, 2)
    again.add({"step": 3, "again": True})
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == [{"step": 1}, {"step": 2}, {"step": 2}, {"step": 3, "again": True}]
    JsonLines(path, 0).close()
    assert path.read_text() == ""
