"""Carries out a plan on one node: starts what belongs there, shows the run, stops it, tells why it failed.

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
from dataclasses import dataclass
from types import FrameType
from typing import Any

from rich.console import Console

from specforge_config.loading import dump_run
from specforge_config.run import RunConfig
from specforge_launch import lifeline
from specforge_launch.beside import Beside, ServiceFailed
from specforge_launch.failure import Failure, explain
from specforge_launch.plan import RunPlan, agent_arguments
from specforge_launch.progress import View
from specforge_launch.run_folder import Follower, RunFolder
from specforge_launch.services import Role, Service

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


@dataclass
class _Outcome:
    """How a node's part of a run ended."""

    last: dict[str, Any]
    """The last event, with the last training step."""
    agent_code: int | None = None
    """How the ranks' agent ended; None where none was started."""
    failure: Failure | None = None
    """How a process beside the ranks failed."""


def run_node(
    config: RunConfig, plan: RunPlan, node: int, out: Console, err: Console, role: Role | None = None
) -> int:
    """Run what belongs on this node to its end.

    Args:
        config: the run.
        plan: what to do.
        node: which of the run's nodes this is; for the role `server`, which of its servers.
        out: where the run is shown.
        err: where a failure is told.
        role: the one part to run; None for the ranks and, in a managed run, everything beside them.

    Returns:
        The exit code: 0 done, 1 failed, 2 the input is at fault, 130 or 143 stopped by Ctrl-C or SIGTERM.

    Raises:
        ValueError: if another launcher works in the folder.
    """
    folder, services = RunFolder(config.folder), services_of(plan, node, role)
    alone = role not in (None, "consumer")
    part = services[0].name if alone else f"node{node}"
    with folder.lock(part) as lock, StopRequests() as requests:
        folder.clear(service.name for service in services)
        folder.launch(part).write_text(dump_run(config))
        with View(out) as view:
            beside = Beside(config, plan, services, folder, folder.launch(part), lock.fileno(), view.message)
            if alone:
                outcome = _serve(beside, requests)
            else:
                outcome = _train(plan, folder, node, lock.fileno(), beside, requests, view)
    return _tell(outcome, folder, node, requests, out, err)


def services_of(plan: RunPlan, node: int, role: Role | None) -> list[Service]:
    """The processes beside the ranks that belong to a node's part of a run.

    Raises:
        ValueError: for a role that the run does not have.
    """
    if role == "consumer" or (role is None and plan.capture is None):
        return []
    chosen = [s for s in plan.capture.services if role in (None, s.role)] if plan.capture else []
    if not chosen:
        raise ValueError(f"--role is {role}, but this run has no such process")
    return [chosen[node]] if role == "server" else chosen


def _serve(beside: Beside, requests: StopRequests) -> _Outcome:
    """Run processes beside the ranks alone, until they end or are to stop."""
    outcome = _Outcome({})
    try:
        beside.start(lambda: requests.count > 0)
        while not (requests.count or beside.ended or beside.failure()):
            beside.show()
            time.sleep(_TICK_SECONDS)
        if requests.count:
            beside.drain(lambda: requests.count > 1)
        outcome.failure = beside.failure()
    except ServiceFailed as failed:
        outcome.failure = failed.failure
    finally:
        beside.stop()
    return outcome


def _train(
    plan: RunPlan,
    folder: RunFolder,
    node: int,
    lock: int,
    beside: Beside,
    requests: StopRequests,
    view: View,
) -> _Outcome:
    """Run a node's ranks, and what belongs beside them, until the ranks end."""
    folder.clear_node(node)
    outcome, agent = _Outcome({}), None
    try:
        beside.start(lambda: requests.count > 0)
        if requests.count == 0:
            agent = _start_agent(plan, folder, node, time.time(), lock)
            outcome.last = _watch(agent, beside, folder, requests, view)
            outcome.agent_code, outcome.failure = agent.returncode, beside.failure()
            if agent.returncode == 0 and outcome.failure is None:
                beside.finish(lambda: requests.count > 1)
                outcome.failure = beside.failure()
    except ServiceFailed as failed:
        outcome.failure = failed.failure
    finally:
        if agent is not None:
            _kill(agent)
        beside.stop()
    return outcome


def _start_agent(
    plan: RunPlan, folder: RunFolder, node: int, started: float, lock: int
) -> subprocess.Popen[bytes]:
    local = next(process for process in plan.processes if process.node == node)
    torchrun = [*agent_arguments(plan, node), *local.command[1:], str(started)]
    command = [sys.executable, "-m", "specforge_launch.agent", str(folder.exits(node)), *torchrun]
    with open(folder.logs / f"agent.node{node}.log", "wb") as log:
        return lifeline.start(command, log, {"OMP_NUM_THREADS": str(plan.threads_per_rank)}, lock)


def _watch(
    agent: subprocess.Popen[bytes], beside: Beside, folder: RunFolder, requests: StopRequests, view: View
) -> dict[str, Any]:
    """Show the run until its agent ends. Returns the last event, with the last training step."""
    events, messages = Follower(folder.progress), Follower(folder.logs / "rank-0.log")
    last: dict[str, Any] = {}
    asked, deadline = False, None
    while True:
        ended = agent.poll() is not None  # before reading, so that nothing written before the end is missed
        for event in map(json.loads, events.lines()):
            view.show(event)
            last = {"step": last.get("step"), **event} if event["stage"] != "train" else event
        for line in messages.lines():
            view.message(line)
        beside.show()
        if ended:
            return last
        if requests.count and not asked:
            folder.stop.touch()
            training = last.get("stage") == "train" and last.get("step") != last.get("total")
            doing = "finishing the step, then saving a checkpoint" if training else "stopping once it can"
            view.message(f"{doing}; press Ctrl-C again to kill")
            asked = True
        if requests.count > 1:
            _kill(agent)
        lost = beside.failure() is not None
        if deadline is None and (lost or folder.rank_errors()):
            deadline = time.monotonic() + _GRACE_SECONDS
            if lost:
                folder.stop.touch()  # ranks that can still end their step save it
        if deadline is not None and time.monotonic() > deadline:
            _kill(agent)
        time.sleep(_TICK_SECONDS)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """End the agent and, through their lifelines, its ranks."""
    if agent.poll() is None:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _tell(
    outcome: _Outcome, folder: RunFolder, node: int, requests: StopRequests, out: Console, err: Console
) -> int:
    """Say how a part of the run ended, where that was not its end. Returns the exit code."""
    last, code = outcome.last, outcome.agent_code
    ranks_failed = code not in (None, 0)
    if requests.count > 1 and (ranks_failed or outcome.failure):
        err.print("killed; the same command goes on from the last checkpoint", highlight=False)
        return requests.exit_code
    if outcome.failure or ranks_failed:
        return _tell_failure(outcome, folder, err)
    if code == 0 and (last.get("stage") == "done" or (node > 0 and not requests.count)):
        return OK
    if code is None and not requests.count:
        return OK
    if last:
        out.print(
            f"stopped after step {last.get('step', 0)}; the same command goes on from there", highlight=False
        )
    return requests.exit_code


def _tell_failure(outcome: _Outcome, folder: RunFolder, err: Console) -> int:
    training = outcome.last.get("stage") == "train"
    failure, peers = outcome.failure, ()
    if outcome.agent_code not in (None, 0):
        ranks = explain(folder, outcome.last.get("step") if training else None)
        failure, peers = (failure, (ranks.headline,)) if failure else (ranks, ranks.peers)
    assert failure is not None
    err.print(failure.headline, style="bold red", markup=False, highlight=False, soft_wrap=True)
    if failure.traceback:
        err.print(failure.traceback.rstrip(), markup=False, highlight=False, soft_wrap=True)
    for line in peers:
        err.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    err.print(f"logs: {folder.logs}", style="dim", highlight=False, soft_wrap=True)
    return USER_ERROR if failure.user_error else FAILED
