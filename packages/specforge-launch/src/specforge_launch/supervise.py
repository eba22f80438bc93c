"""Carries out a plan on one node: starts torchrun's agent, shows the run, stops it, tells why it failed.

Invariant: when this returns or is killed, no process of the run is left (`lifeline`), and the folder holds a
whole checkpoint or none. The first Ctrl-C or SIGTERM asks the ranks, through the file `stop`, to save a
checkpoint after their step; the second kills.
"""

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

from rich.console import Console

from specforge_config.loading import dump_run
from specforge_config.run import RunConfig
from specforge_launch import lifeline
from specforge_launch.failure import explain
from specforge_launch.plan import RunPlan, agent_arguments
from specforge_launch.progress import View
from specforge_launch.run_folder import Follower, RunFolder

OK, FAILED, USER_ERROR, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
_TICK_SECONDS = 0.1
_GRACE_SECONDS = 10.0
"""How long after the first error the agent may take to end all ranks; then it is killed."""


class StopRequests:
    """Counts SIGINT and SIGTERM while it is entered."""

    def __init__(self) -> None:
        """Nothing was requested yet."""
        self.count = 0
        self.exit_code = INTERRUPTED
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        """Take both signals over."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Give them back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.exit_code = TERMINATED if number == signal.SIGTERM else INTERRUPTED


def run_node(config: RunConfig, plan: RunPlan, node: int, out: Console, err: Console) -> int:
    """Run this node's ranks to their end.

    Args:
        config: the run.
        plan: what to do.
        node: which of the run's nodes this is.
        out: where the run is shown.
        err: where a failure is told.

    Returns:
        The exit code: 0 done, 1 failed, 2 the input is at fault, 130 or 143 stopped by Ctrl-C or SIGTERM.

    Raises:
        ValueError: if another launcher works in the folder.
    """
    started, folder = time.time(), RunFolder(config.folder)
    with folder.lock(node) as lock, StopRequests() as requests:
        folder.clear(node, [process.rank for process in plan.processes if process.node == node])
        folder.launch(node).write_text(dump_run(config))
        agent = _start_agent(plan, folder, node, started, lock.fileno())
        try:
            last = _watch(agent, folder, requests, out)
        finally:
            _kill(agent)
        if agent.returncode == 0:
            if last.get("stage") == "done" or (node > 0 and not requests.count):
                return OK
            out.print(
                f"stopped after step {last.get('step', 0)}; the same command goes on from there",
                highlight=False,
            )
            return requests.exit_code
        if requests.count > 1:
            err.print("killed; the same command goes on from the last checkpoint", highlight=False)
            return requests.exit_code
        return _tell(folder, last, err)


def _start_agent(
    plan: RunPlan, folder: RunFolder, node: int, started: float, lock: int
) -> subprocess.Popen[bytes]:
    local = next(process for process in plan.processes if process.node == node)
    torchrun = [*agent_arguments(plan, node), *local.command[1:], str(started)]
    command = [sys.executable, "-m", "specforge_launch.agent", str(folder.exits(node)), *torchrun]
    # Safe path: a module of the working directory never shadows an installed one.
    environment = {
        **lifeline.environment(),
        "OMP_NUM_THREADS": str(plan.threads_per_rank),
        "PYTHONSAFEPATH": "1",
    }
    with open(folder.logs / f"agent.node{node}.log", "wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher alone
            pass_fds=(lock,),
        )


def _watch(
    agent: subprocess.Popen[bytes], folder: RunFolder, requests: StopRequests, out: Console
) -> dict[str, Any]:
    """Show the run until its agent ends. Returns the last event, with the last training step."""
    events, messages = Follower(folder.progress), Follower(folder.logs / "rank-0.log")
    last: dict[str, Any] = {}
    asked, deadline = False, None
    with View(out) as view:
        while True:
            ended = (
                agent.poll() is not None
            )  # before reading, so that nothing written before the end is missed
            for event in map(json.loads, events.lines()):
                view.show(event)
                last = {"step": last.get("step"), **event} if event["stage"] != "train" else event
            for line in messages.lines():
                view.message(line)
            if ended:
                return last
            if requests.count and not asked:
                folder.stop.touch()
                view.message("finishing the step, then saving a checkpoint; press Ctrl-C again to kill")
                asked = True
            if requests.count > 1:
                _kill(agent)
            if deadline is None and any(folder.errors.iterdir()):
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                _kill(agent)
            time.sleep(_TICK_SECONDS)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """End the agent and, through their lifelines, its ranks."""
    if agent.poll() is None:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _tell(folder: RunFolder, last: dict[str, Any], err: Console) -> int:
    training = last.get("stage") == "train"
    failure = explain(folder.errors, last.get("step") if training else None)
    err.print(failure.headline, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if failure.traceback:
        err.print(failure.traceback.rstrip(), markup=False, highlight=False, soft_wrap=True)
    for line in failure.peers:
        err.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    err.print(f"logs: {folder.logs}", style="dim", highlight=False, soft_wrap=True)
    return USER_ERROR if failure.user_error else FAILED
