"""Runs the Triton kernels' tests through Triton's interpreter, which is chosen before Triton is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "anchored_attention/test_api.py",
    "draft_layer/test_api.py",
    "dspark_objective/test_triton.py",
    "test_warm_up.py",
)


@pytest.mark.slow
def test_triton_kernels_run_in_the_interpreter() -> None:
    here = Path(__file__).parent
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-k",
        "triton",
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *(str(here / file) for file in FILES)],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.strip().splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) >= 29, summary
