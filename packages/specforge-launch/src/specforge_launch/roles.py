"""What a process beside the ranks runs: `python -m specforge_launch.roles <role> <launch.yaml> <arguments>`.

The store's master and SGLang replace this process once their commands are settled; the producer and a server
over transformers run in it. A failure before that, or of those two, is recorded in `errors/<name>.json`:
type, message, traceback.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from specforge_launch.lifeline import die_with_parent, stop_with_parent

if TYPE_CHECKING:
    from specforge_config.run import RunConfig


def main(role: str, launched: str, *arguments: str) -> None:
    """Run a role.

    Args:
        role: store, server, producer or sweep.
        launched: the run's configuration.
        arguments: `store <metrics port>`, `server <index> <port> <device>`, `producer <server address>…`,
            `sweep`.
    """
    from specforge_config.loading import load_run
    from specforge_launch.run_folder import RunFolder

    config = load_run(launched)
    name = f"{role}-{arguments[0]}" if role == "server" else role
    record_failures(RunFolder(config.folder).error(name))
    roles = {"store": run_store, "server": run_server, "producer": produce, "sweep": sweep}
    roles[role](config, *arguments)


def run_store(config: "RunConfig", metrics_port: str) -> None:
    """Become Mooncake's master.

    Raises:
        ValueError: if Mooncake is not installed.
    """
    from specforge_config.store import MooncakeStore
    from specforge_launch.services import master_of

    store = config.disaggregated.store
    assert isinstance(store, MooncakeStore), "a store of files needs no process"
    _become(master_of(store, int(metrics_port)).command(), {})


def run_server(config: "RunConfig", index: str, port: str, device: str) -> None:
    """Settle the capture contract and become a capture server.

    Raises:
        ValueError: for a target that does not fit the draft, or settings that the engine cannot serve with.
    """
    from specforge_capture.sglang.engine_args import engine_environment
    from specforge_kernels.inductor import keep_compiled
    from specforge_launch.resolve import resolve
    from specforge_launch.services import server_command, server_store

    resolved, kind = resolve(config), "cuda" if device == "cuda" else "cpu"
    deployment, place = config.disaggregated, int(index)
    if config.target.backend == "hf" and deployment.servers.python is None:
        # What `server_command` says, without importing torch a second time.
        from specforge_capture.reference_server import serve

        seed = config.seed if config.dummy_weights else None
        store, host = server_store(deployment, place), deployment.servers.host
        path = config.target.path
        return serve(path, resolved.spec, store, host, int(port), device=device, dummy_seed=seed)
    contract = resolved.spec.model_dump_json()
    command = server_command(config, resolved.target, kind, place, int(port), contract)
    keep_compiled()  # a server's temporary folder ends with it
    environment = engine_environment(kind, config.engine.tp_size) if config.target.backend == "sglang" else {}
    _become(command, environment)


def produce(config: "RunConfig", *servers: str) -> None:
    """Have the run's prompts captured until all is trained, or SIGTERM."""
    from specforge_capture.producer import run_producer
    from specforge_launch.assembly import prepare

    deployment, prepared = config.disaggregated, prepare(config)
    tell = partial(print, flush=True)
    produced = run_producer(
        deployment.production,
        [f"http://{address}" for address in servers],
        deployment.store,
        prepared.prompts,
        prepared.plan,
        prepared.resolved.spec,
        Path(config.folder),
        tell,
    )
    tell(f"{produced.captured} samples captured, {produced.retried} requests repeated")


def sweep(config: "RunConfig") -> None:
    """Free what a run whose producer was killed left in the store."""
    from specforge_capture.producer import sweep as free
    from specforge_capture.stores.base import open_store

    with closing(open_store(config.disaggregated.store, contribute=False)) as store:
        free(Path(config.folder), store)


def record_failures(path: Path) -> None:
    """Let an exception that ends this process be written to `path` beside its traceback in the log."""

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        print(text, file=sys.stderr, flush=True)
        staged = path.with_suffix(".new")
        staged.write_text(json.dumps({"type": kind.__name__, "message": str(error), "traceback": text}))
        staged.replace(path)

    sys.excepthook = record


def _become(command: Sequence[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], list(command), {**os.environ, **environment})
    except FileNotFoundError:
        raise ValueError(f"there is no {command[0]} (deployment.servers.python names a server's)") from None


if __name__ == "__main__":
    (stop_with_parent if sys.argv[1] == "producer" else die_with_parent)()
    main(*sys.argv[1:])
