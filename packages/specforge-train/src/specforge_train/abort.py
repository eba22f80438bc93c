"""What happens when a rank fails: its traceback is recorded, communication is cut, and the process ends at
once.

Invariant: a rank of several that failed never runs an orderly teardown, because anything in it may wait for
peers that wait in turn. Ending at once closes its connections; peers then fail in their next collective, and
torchrun ends those that do not.

The origin comes first: a rank that failed only because a peer did says so and records itself later than the
origin, whose error torchrun shows by the earliest time stamp.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

PEER_GRACE_SECONDS = 1.5
"""torchrun's time stamps are whole seconds: a rank that failed through a peer records itself at least one
later.
"""
ABORT_SECONDS = 5.0
"""NCCL may take long to cut its connections; the process ends without it then."""

GLOO_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Read error \[|Broken pipe|Timed out waiting \d+ms"
)
"""How gloo tells that a peer went away or did not come."""
GLOO_RAISES = (RuntimeError, CheckpointException)
"""These types themselves: subclasses tell of other connections, such as a store's, in the same words."""


@contextmanager
def abort_on_error(
    folder: Path, rank: int, size: int, step: Callable[[], int | None] = lambda: None
) -> Generator[None]:
    """Record an exception of the body in `errors/rank-<rank>.json`, then end the process, or re-raise in a
    world of one.

    The record holds rank, step (optimizer steps that were done), time, type, message, traceback, and `peer`:
    whether the rank failed only because another one did. It is also written where torchrun's agent looks for
    it. Where contexts are nested, the inner one records.

    Args:
        folder: the run's folder.
        rank: this rank.
        size: ranks of the world.
        step: gives the optimizer steps done, None outside of training.
    """
    path = folder / "errors" / f"rank-{rank}.json"
    path.unlink(missing_ok=True)  # of an earlier start
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a failed checkpoint of torch is no Exception
        if not path.exists():
            _explain(error)
            if peer := size > 1 and _is_peer_failure(error):
                time.sleep(PEER_GRACE_SECONDS)
                error.add_note(_origin(folder, rank, size))
            record_error(path, error, rank, step(), peer)
        if size == 1:
            raise
        end_process()


def record_error(path: Path, error: BaseException, rank: int, step: int | None, peer: bool) -> None:
    """Write one rank's failure to `path`, to torchrun's error file and to standard error."""
    text = "".join(traceback.format_exception(error))
    where = f"rank {rank}" + ("" if step is None else f", in step {step + 1}")
    print(
        f"{where}: {'ended by the failure of a peer' if peer else 'failed'}\n{text}",
        file=sys.stderr,
        flush=True,
    )
    record = {
        "rank": rank,
        "step": step,
        "time": time.time(),
        "type": type(error).__name__,
        "message": "\n".join([str(error), *getattr(error, "__notes__", ())]),
        "traceback": text,
        "peer": peer,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1))
        temporary.replace(path)
    except OSError as unwritable:  # a full disk may be what failed
        print(f"{where}: {path} could not be written: {unwritable}", file=sys.stderr, flush=True)
    get_error_handler().record_exception(error)


def read_errors(folder: Path) -> list[dict]:
    """The failures recorded in a run's folder, origins before ranks that a peer's failure ended, then by
    time.
    """
    records = [json.loads(path.read_text()) for path in sorted((folder / "errors").glob("rank-*.json"))]
    return sorted(records, key=lambda record: (record["peer"], record["time"]))


def end_process() -> None:
    """Cut the communicators and leave without any teardown, with exit status 1."""
    if dist.is_initialized() and dist.is_nccl_available() and torch.cuda.is_available():
        # Kernels that wait for peers would keep the device busy until their time limit.
        cut = threading.Thread(target=dist.distributed_c10d._abort_process_group, daemon=True)
        cut.start()
        cut.join(ABORT_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _is_peer_failure(error: BaseException) -> bool:
    """Whether a collective failed because the other side went away or did not come."""
    lost = isinstance(error, dist.DistBackendError | dist.DistNetworkError)
    return lost or (type(error) in GLOO_RAISES and GLOO_LOST_PEER.search(str(error)) is not None)


def _origin(folder: Path, rank: int, size: int) -> str:
    """What the peers recorded, for the message of a rank that only followed."""
    for record in read_errors(folder):
        if not record["peer"] and record["rank"] != rank and record["rank"] < size:
            return f"the origin is rank {record['rank']}: {record['type']}: {record['message']}"
    return (
        "a peer ended without a word (killed, or out of host memory) or took longer than "
        "deployment.trainer.timeout_seconds: see the exit status of each rank"
    )


def _explain(error: BaseException) -> None:
    """Name the settings that lower memory, where memory is what ran out and the error does not say so yet."""
    text = str(error)
    if getattr(error, "__notes__", None):
        return
    if isinstance(error, torch.OutOfMemoryError):
        error.add_note(
            "out of device memory while the draft trained: lower training.batch_size, data.max_length or "
            "draft.num_anchors; shard more (training.sharding full, or hybrid in wider islands); or lower "
            "engine.max_total_tokens or engine.mem_fraction_static of a target in the trainer's process"
        )
    elif isinstance(error, MemoryError) or "can't allocate memory" in text:
        error.add_note(
            "out of host memory: lower training.batch_size, data.max_length or "
            "deployment.trainer.nproc_per_node"
        )
