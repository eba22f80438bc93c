"""Commands that end with the thread that started them, whatever ends that one."""

import os
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG survives the exec.
_PROGRAM = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"
)


def tied(command: Sequence[str]) -> list[str]:
    """The command that runs `command`, an executable's path and arguments, as a child of this process, and is
    killed with the thread that starts it. Linux only."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), *command]
