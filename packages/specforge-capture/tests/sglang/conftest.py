"""The environment that runs SGLang on a CPU, and programs in it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
INSTALL = ROOT / "scripts" / "sglang_cpu" / "install.py"
ENVIRONMENT = ROOT / ".cache" / "sglang-cpu"

Program = Callable[..., None]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The environment's interpreter; without the environment its tests are skipped."""
    if not (ENVIRONMENT / "built-from").is_file():
        raise pytest.skip.Exception(f"needs SGLang on a CPU: python3.11 {INSTALL.relative_to(ROOT)}")
    return ENVIRONMENT / "bin" / "python"


@pytest.fixture(scope="session")
def run_ranks(sglang_python: Path) -> Program:
    """Runs a program on gloo ranks in the environment; what it prints is shown if it fails."""

    def run(program: Path, *arguments: object, ranks: int, seconds: float = 300) -> None:
        meeting = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
        torchrun = (sglang_python, "-m", "torch.distributed.run", *meeting, f"--nproc-per-node={ranks}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            [*map(str, torchrun), str(program), *map(str, arguments)],
            env=environment,
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-8000:]

    return run
