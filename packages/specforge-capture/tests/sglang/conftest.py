"""The environment that runs SGLang on a CPU, programs in it, and capture servers of the tiny target."""

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from specforge_capture.refs import checksum
from specforge_capture.sglang.engine_args import engine_environment
from specforge_capture.sglang.leftovers import mapped_by_group, remove_unmapped
from specforge_capture.stores.base import FeatureStore, open_store
from specforge_capture.stores.master import free_ports
from specforge_capture.stores.memory import host_view
from specforge_capture.wire import CaptureClient
from specforge_config.features import CaptureSpec, spec_hash
from specforge_config.store import FileStore, MooncakeStore
from specforge_config.target import target_revision

ROOT = Path(__file__).resolve().parents[4]
INSTALL = ROOT / "scripts" / "sglang_cpu" / "install.py"
ENVIRONMENT = ROOT / ".cache" / "sglang-cpu"
TARGET = ROOT / "recipes" / "tiny-target"
LAYERS = (3, 0, 2)
"""Of four: the last one too, and not in their order."""
START_SECONDS = 300

Program = Callable[..., None]
Reference = Callable[[list[int]], Tensor]


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
        done = subprocess.run(
            [*map(str, torchrun), str(program), *map(str, arguments)],
            env=_environment(),
            timeout=seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-8000:]

    return run


@dataclass(frozen=True)
class Server:
    """A running capture server."""

    client: CaptureClient
    store: FeatureStore
    """A reader's side of its store."""
    log: Path
    spec: CaptureSpec

    def capture(self, key: str, tokens: list[int]) -> Tensor:
        """[n, width] features of one prompt, as they lie in the store."""
        ref = self.client.capture(key, f"sample of {key}", tokens, spec_hash(self.spec))
        assert (ref.key, ref.rows, ref.width) == (key, len(tokens), 4 * self.spec.hidden_size)
        rows = torch.empty(ref.rows, ref.width)
        for name, first, last, expected in ref.pieces():
            self.store.get_into([(name, rows[first:last])])
            assert checksum(host_view(rows[first:last])) == expected
        return rows


Serve = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="session")
def tiny_contract() -> CaptureSpec:
    """Three layers and the final state of the tiny target, in float32."""
    return CaptureSpec(
        method="dspark",
        layer_ids=LAYERS,
        final_state=True,
        dtype="float32",
        hidden_size=128,
        vocab_size=1024,
        target_revision=target_revision(TARGET),
        tokenizer_hash="none",
    )


@pytest.fixture(scope="session")
def serve(sglang_python: Path, tiny_contract: CaptureSpec) -> Serve:
    """Runs a capture server of the tiny target for as long as a block lasts."""

    @contextmanager
    def run(
        folder: Path,
        store: MooncakeStore | FileStore,
        *options: str,
        tp_size: int = 1,
        variables: dict[str, str] | None = None,
    ) -> Generator[Server]:
        (port,), log = free_ports(1), folder / "server.log"
        command = [
            *(str(sglang_python), "-m", "sglang.launch_server", "--model-path", str(TARGET)),
            *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-tokenizer-init"),
            *("--mem-fraction-static", "0.5", "--max-total-tokens", "16384", "--tp-size", str(tp_size)),
            *("--host", "127.0.0.1", "--port", str(port), "--cuda-graph-backend-decode", "disabled"),
            *("--enable-spec-capture", "--spec-capture-spec", tiny_contract.model_dump_json()),
            *("--spec-capture-store", store.model_dump_json(), *options),
        ]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                env=_environment(tp_size) | (variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log)
            reader = open_store(store, contribute=False)
            yield Server(CaptureClient(url, timeout=120), reader, log, tiny_contract)
            reader.close()
        finally:
            # The server's children are in its session; they are given no time, as they keep nothing.
            shared = mapped_by_group(process.pid)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            remove_unmapped(shared)

    return run


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Transformers' features [n, width] of one prompt, columns as in the contract."""
    model = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    outputs: dict[int, Tensor] = {}
    for layer, module in enumerate(model.model.layers):
        module.register_forward_hook(
            lambda _, inputs, output, layer=layer: outputs.update({layer: output[0]})
        )

    @torch.no_grad()
    def run(tokens: list[int]) -> Tensor:
        final = model.model(torch.tensor([tokens])).last_hidden_state[0]
        return torch.cat([*(outputs[layer].view(len(tokens), -1) for layer in LAYERS), final], dim=-1)

    return run


def _environment(tp_size: int | None = None) -> dict[str, str]:
    """What SGLang's processes get; with `tp_size` also what a server reads when it starts."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONPATH", None)
    return environment | ({} if tp_size is None else engine_environment("cpu", tp_size))


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=20):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"the server ended with {process.poll()}: {log.read_text(errors='replace')[-6000:]}")
