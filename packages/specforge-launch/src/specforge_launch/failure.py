"""Why a run failed: told from what ranks wrote and how they ended, the origin first.

A rank that raises writes `errors/rank-<r>.json`: rank, steps done, time, type, message, traceback and `peer`,
whether it only lost a peer. The agent writes `errors/exits.node<n>.json`: the exit code of each rank that
failed. A rank that the kernel killed wrote nothing. So the origin is the earliest rank that raised for a
reason of its own; else one that ended without a word; else the first that lost a peer.
"""

import json
import signal
from dataclasses import dataclass
from typing import Any

from specforge_launch.run_folder import RunFolder


@dataclass(frozen=True)
class Failure:
    """What to print, and how to exit."""

    headline: str
    """The origin in a sentence or, for a user's error, its message."""
    traceback: str = ""
    """The origin's traceback; empty where there is none."""
    peers: tuple[str, ...] = ()
    """What happened to other ranks, a line each."""
    user_error: bool = False
    """Whether the run's input is at fault: a ValueError before training began."""


def explain(folder: RunFolder, last_step: int | None) -> Failure:
    """Find the origin of a failure.

    Args:
        folder: the run's.
        last_step: the last optimizer step that rank 0 reported; None outside of training.
    """
    raised = [json.loads(path.read_text()) for path in folder.rank_errors()]
    raised.sort(key=lambda record: (record["peer"], record["time"]))
    silent: dict[int, int] = {}
    for path in folder.all_exits():
        silent |= {int(rank): code for rank, code in json.loads(path.read_text())["exit_codes"].items()}
    for record in raised:
        silent.pop(record["rank"], None)
    # The agent ends the others by SIGTERM: the origin ended otherwise.
    unasked = sorted(silent, key=lambda rank: (silent[rank] == -signal.SIGTERM, rank))
    if raised and not (raised[0]["peer"] and unasked and silent[unasked[0]] != -signal.SIGTERM):
        return _raised(raised[0], raised[1:], unasked)
    if unasked:
        return _silent(unasked[0], silent[unasked[0]], raised, unasked[1:], last_step)
    return Failure("the ranks' agent ended before its ranks")


def _raised(origin: dict[str, Any], later: list[dict[str, Any]], silent: list[int]) -> Failure:
    if origin["type"] in ("ValueError", "ConfigError") and origin["step"] is None:
        return Failure(origin["message"], user_error=True)
    headline = f"rank {origin['rank']} failed{_at(origin['step'])}: {origin['type']}: {origin['message']}"
    return Failure(headline, origin["traceback"], _peers(later, silent))


def _silent(
    rank: int, code: int, raised: list[dict[str, Any]], others: list[int], last_step: int | None
) -> Failure:
    steps = [record["step"] for record in raised if record["step"] is not None]
    step = min(steps) if steps else last_step
    hint = "; see its log" if code >= 0 else ""
    return Failure(how_ended(f"rank {rank}", code, _at(step)) + hint, peers=_peers(raised, others))


def how_ended(name: str, code: int, where: str = "") -> str:
    """How a process that wrote nothing ended.

    Args:
        name: what it is called.
        code: its exit code, negative for a signal.
        where: in which step.
    """
    if code >= 0:
        return f"{name} ended with exit code {code}{where}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = ": look for the kernel's out-of-memory killer (dmesg), or for who sent it"
    return f"{name} was killed by {signal.Signals(-code).name}{where}{hint}"


def _peers(raised: list[dict[str, Any]], silent: list[int]) -> tuple[str, ...]:
    lines = [
        f"rank {r['rank']} then failed{_at(r['step'])}: {r['type']}: {r['message'].partition(chr(10))[0]}"
        for r in raised
    ]
    if silent:
        lines.append(
            f"ended because of it: rank{'s' * (len(silent) > 1)} {', '.join(map(str, sorted(silent)))}"
        )
    return tuple(lines)


def _at(done: int | None) -> str:
    return "" if done is None else f" in step {done + 1}"
