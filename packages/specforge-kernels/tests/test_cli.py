import subprocess
import sys

import pytest

from specforge_kernels.cli import main


def test_status_prints_each_choice_with_its_reason(capsys) -> None:
    assert main(["status", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("anchored_attention: sdpa - ") for line in lines)
    assert any(line.startswith("dspark_objective: reference - ") for line in lines)
    assert any(line.startswith("matrix products: aten - ") for line in lines)


def test_bench_times_each_part(capsys) -> None:
    sizes = ["--anchors", "4", "--block", "3", "--hidden", "128", "--vocabulary", "300"]
    assert main(["parts", "--device", "cpu", "--lengths", "20", "3", *sizes]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        (tokens, slots, part)
        for tokens, slots in (("20", "12"), ("3", "6"))
        for part in ("layout", "anchored_attention", "dspark_objective")
    ]
    assert all(float(row[4]) > 0 for row in rows)


def test_help_loads_no_torch() -> None:
    check = "import sys, specforge_kernels.cli as c; c.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_unknown_command_is_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["benchmark"])
    assert "invalid choice" in capsys.readouterr().err
