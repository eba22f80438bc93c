"""Processes that end with their parent, so that a killed launcher leaves no rank behind.

The chain is launcher -> torchrun's agent -> ranks. Each child calls `die_with_parent` before anything else,
and each parent names itself in the environment of its children. On Linux the kernel kills the child
(`prctl(PR_SET_PDEATHSIG)`, which also reaches a process that sits inside a collective); elsewhere a thread
watches the parent.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

PARENT = "SPECFORGE_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5
STOP_SECONDS = 20.0
"""How long a process that has something to put away may take once its parent has ended."""


def environment() -> dict[str, str]:
    """The environment for children of this process that call `die_with_parent`."""
    return {**os.environ, PARENT: str(os.getpid())}


def start(
    command: Sequence[str], log: IO[bytes], variables: Mapping[str, str], *locks: int
) -> subprocess.Popen[bytes]:
    """Start a module of ours that calls `die_with_parent`, as a process group of its own: a terminal's Ctrl-C
    reaches the launcher alone.

    Args:
        command: interpreter, module and arguments.
        log: takes what it prints.
        variables: set in its environment.
        locks: descriptors of locks, such as that of the run's folder, which it holds with its parent.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # Safe path: a module of the working directory never shadows an installed one. Mooncake logs every
        # connection; from warnings on is what a user wants to see, who has not asked for more.
        env={"GLOG_minloglevel": "1", **environment(), **variables, "PYTHONSAFEPATH": "1"},
        start_new_session=True,
        pass_fds=locks,
    )


def die_with_parent() -> None:
    """Let this process be killed when its parent ends, and name it as the parent of its own children."""
    parent = int(os.environ.get(PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the request was in force
        os._exit(1)
    os.environ[PARENT] = str(os.getpid())


def stop_with_parent() -> None:
    """Let this process be asked to end at once, by SIGTERM and SIGTERM again, when its parent ends: it has
    something to put away. If it has not ended soon after, it is killed."""
    parent = int(os.environ.get(PARENT, os.getppid()))
    threading.Thread(target=_stop_after, args=(parent,), daemon=True).start()
    os.environ[PARENT] = str(os.getpid())


def _watch(parent: int) -> None:
    _wait_for_end(parent)
    os._exit(1)


def _stop_after(parent: int) -> None:
    _wait_for_end(parent)
    for seconds in (_POLL_SECONDS, STOP_SECONDS):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
    os._exit(1)


def _wait_for_end(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
