import numpy as np

from specforge_capture.prompts.samples import PromptReport
from specforge_capture.targets.base import PromptRow
from specforge_launch.prepare import masked_text, report_table


def test_supervised_runs_are_marked() -> None:
    sample = PromptRow("a:1", np.array([0, 1, 2, 3, 4], np.int32), np.array([0, 1, 1, 0, 1], bool))
    text = masked_text(sample, lambda ids: "".join("abcde"[i] for i in ids))
    assert text.plain == "abcde"
    assert [(text.plain[s.start : s.end], "green" in str(s.style)) for s in text.spans] == [
        ("a", False),
        ("bc", True),
        ("d", False),
        ("e", True),
    ]


def test_the_report_gives_counts_and_shares() -> None:
    report = PromptReport(rows=5, kept=4, samples=4, truncated=1, tokens=200, supervised=50)
    cells = [list(column.cells) for column in report_table(report, "cache/x.arrow").columns]
    table = dict(zip(*cells, strict=True))
    assert table["rows"] == "5: 4 kept, 0 dropped, 1 truncated"
    assert table["tokens"] == "200, 50 a sample"
    assert table["supervised"] == "50 tokens, 25%"
