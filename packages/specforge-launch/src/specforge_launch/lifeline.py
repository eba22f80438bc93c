"""Processes that end with their parent, so that a killed launcher leaves no rank behind.

The chain is launcher -> torchrun's agent -> ranks. Each child calls `die_with_parent` before anything else,
and each parent names itself in the environment of its children. On Linux the kernel kills the child
(`prctl(PR_SET_PDEATHSIG)`, which also reaches a process that sits inside a collective); elsewhere a thread
watches the parent.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT = "SPECFORGE_PARENT_PID"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.5


def environment() -> dict[str, str]:
    """The environment for children of this process that call `die_with_parent`."""
    return {**os.environ, PARENT: str(os.getpid())}


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


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
