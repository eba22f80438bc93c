"""Tables for people: a plan, the summary of a run, a report of prepared prompts."""

import shlex
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from specforge_launch.memory import MemoryPlan
from specforge_launch.plan import RunPlan
from specforge_launch.services import CapturePlan, Service

DUMMY_WEIGHTS = "dummy weights: the target is random; speed and memory are real, losses and τ are not"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """A number of bytes with the unit that keeps it short."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as ranges: `0-3, 6`."""
    runs = groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0])
    spans = [[rank for _, rank in run] for _, run in runs]
    return ", ".join(f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans)


def counted(count: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _two_columns(title: str, rows: Iterable[tuple[str, str]], warning: str = "") -> Table:
    """Names and values; the row called `warning` stands out."""
    table = Table(
        title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        style = "bold red not dim" if name == warning else None
        table.add_row(Text(name), Text(value), style=style)
    return table


def plan_tables(plan: RunPlan) -> list[Table]:
    """A plan as tables: the run, its memory, what passes through a store, processes, commands, outputs."""
    return [
        _two_columns(f"plan of {plan.name}", _run_rows(plan)),
        memory_table("predicted peak a rank", plan.memory),
        *(capture_tables(plan, plan.capture) if plan.capture else ()),
        _two_columns("commands of each node", [(node.host, "\n".join(node.commands)) for node in plan.nodes]),
        _two_columns("outputs", plan.outputs.items()),
    ]


def _run_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """What is decided about a run; ranks that capture nothing form no islands, and one node has no meeting
    point to name."""
    steps, meeting, islands = plan.steps, plan.rendezvous, plan.islands
    nodes = len({process.node for process in plan.processes})
    devices = {process.device.partition(":")[0] for process in plan.processes}
    ranks = counted(plan.world_size, "rank")
    engine = ", ".join(f"{name}={value}" for name, value in plan.engine_args.items())
    of_ranks = f"{len(islands)} of {counted(plan.tp_size, 'rank')}: {' | '.join(map(ranks_text, islands))}"
    rows = [
        ("target", DUMMY_WEIGHTS if plan.engine_args.get("load_format") == "dummy" else ""),
        ("deployment", plan.mode),
        ("world", f"{ranks} on {counted(nodes, 'node')}, {', '.join(devices)}"),
        ("islands", "" if plan.capture else of_ranks),
        ("draft", f"{counted(plan.mesh[0], 'replica')} x {counted(plan.mesh[1], 'shard')}"),
        ("rendezvous", f"{meeting.endpoint} ({meeting.run_id})" if nodes > 1 else ""),
        ("threads", f"{plan.threads_per_rank} a rank"),
        ("servers' engine" if plan.capture else "engine", engine),
        ("rows", f"{steps.rows}, before unusable ones are dropped"),
        ("order", f"by length among {grouped} steps" if (grouped := steps.group_by_length) else ""),
        ("steps", f"{steps.total_steps} ({steps.steps_per_epoch} an epoch)"),
        (
            "batch",
            f"{steps.global_batch_size} = {ranks} x {counted(steps.samples_per_rank, 'sample')} "
            f"x {counted(steps.accumulation, 'micro-step')}",
        ),
    ]
    return [(name, text) for name, text in rows if text]


def memory_table(title: str, memory: MemoryPlan) -> Table:
    """A peak by part; where it does not fit, what to change."""
    rows = [(name, bytes_text(size)) for name, size in memory.parts.items() if size]
    limit = "" if memory.capacity is None else f" of {bytes_text(memory.capacity)}"
    rows.append(("total", bytes_text(memory.total) + limit))
    if memory.fits is False:
        changes = [("lower", memory.to_lower), ("raise", memory.to_raise)]
        rows.append(("does not fit", "; ".join(f"{how} {', '.join(keys)}" for how, keys in changes if keys)))
    return _two_columns(title, rows, warning="does not fit")


def capture_tables(plan: RunPlan, capture: CapturePlan) -> list[Table]:
    """A server's memory, what passes through the store, and the processes."""

    def mark(samples: int, size: int | None) -> str:
        return counted(samples, "sample") + ("" if size is None else f", {bytes_text(size)}")

    window = f"{bytes_text(capture.window_bytes)}, {counted(capture.window_samples, 'sample')}"
    features = [
        ("a sample", f"{bytes_text(capture.sample_bytes)} at data.max_length"),
        ("an optimizer window", window),
        ("captured ahead, at most", mark(capture.high_samples, capture.high_bytes)),
        ("capture goes on below", mark(capture.low_samples, capture.low_bytes)),
        ("store", "what the disk holds" if capture.store_bytes is None else bytes_text(capture.store_bytes)),
    ]
    each = "a server" if plan.device == "cpu" else "a server's GPU"
    return [
        memory_table(f"predicted peak {each}", capture.server_memory),
        _two_columns("features", features),
        _two_columns("processes", [*map(_service_row, capture.services), *_consumer_rows(plan)]),
    ]


def _service_row(service: Service) -> tuple[str, str]:
    host, _, port = service.address.rpartition(":")
    where = [f"on {service.address}" if port != "0" else f"on a free port of {host}"] if host else []
    where += [f"GPUs {ranks_text(service.gpus)}"] if service.gpus else []
    return service.name, ", ".join([*where, shlex.join(service.command)])


def _consumer_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The ranks of each node, which are started alike."""
    rows = []
    for node, group in groupby(plan.processes, key=lambda process: process.node):
        ranks = list(group)
        several = len(ranks) < plan.world_size
        where = [f"ranks {ranks_text(process.rank for process in ranks)}"]
        where += [f"GPUs {ranks_text(p.local_rank for p in ranks)}"] if plan.device == "cuda" else []
        name = f"consumer, node {node}" if several else "consumer"
        rows.append((name, ", ".join([*where, shlex.join(ranks[0].command)])))
    return rows


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """`summary.json` as (name, text) rows; empty for an empty summary."""
    if not summary:
        return []
    rows = [("target", DUMMY_WEIGHTS)] if summary.get("dummy_weights") else []
    if summary.get("tau_trained") is not None:
        slots = slots_text(summary["accept_by_slot"])
        rows += [
            ("acceptance length τ, untrained", f"{summary['tau_untrained']:.2f} tokens a round"),
            ("acceptance length τ, trained", f"{summary['tau_trained']:.2f} tokens a round"),
            ("acceptance by slot", slots),
            ("lossless", lossless_text(summary["lossless_identical"], summary["lossless_total"])),
        ]
    shares = (f"{summary['share_' + part]:.0%} {part}" for part in ("capture", "train", "bubble"))
    rows += [
        ("steps", str(summary["steps"])),
        ("samples/s", f"{summary['samples_per_s']:.1f}"),
        ("a step's time", " / ".join(shares)),
        *(
            [("seconds to the first step", first_step_text(summary))]
            if summary.get("first_step_seconds")
            else []
        ),
        ("seconds in all", f"{summary['seconds']:.0f}"),
    ]
    return rows + [(name, path) for name, path in summary["paths"].items()]


def first_step_text(start: dict[str, Any]) -> str:
    """How long the first step took to come, by part."""
    parts = (f"{name} {spent:.1f}" for name, spent in start["startup_seconds"].items() if "/" not in name)
    return f"{start['first_step_seconds']:.0f}: {', '.join(parts)}"


def slots_text(shares: Iterable[float | None]) -> str:
    """Acceptance by slot; a dash where no slot was drafted."""
    return "  ".join("-" if share is None else f"{share:.2f}" for share in shares)


def lossless_text(identical: int, total: int) -> str:
    """The lossless count in words."""
    return f"{identical} of {total} greedy outputs identical to the target's own"


def summary_table(summary: dict[str, Any]) -> Table:
    """The table at the end of a run."""
    return _two_columns(f"{summary['name']}: done", summary_rows(summary))


def measurement_tables(result: dict[str, Any]) -> list[Table]:
    """What `evaluate` measured."""
    table = Table(
        title="speculative decoding", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    for name, side in (("prompts", "left"), ("T", "right"), ("τ", "right"), ("by slot", "left"),
                       ("identical", "right"), ("speed-up", "right"), ("tokens", "right")):  # fmt: skip
        table.add_column(name, justify=side, header_style="dim", no_wrap=name != "by slot")
    for row in result["sets"]:
        identical, total = row["lossless_identical"], row["lossless_total"]
        table.add_row(
            row["name"],
            f"{row['temperature']:g}",
            "-" if row["tau"] is None else f"{row['tau']:.2f}",
            slots_text(row["accept_by_slot"]),
            "-" if total is None else f"{identical} of {total}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            str(row["tokens"]),
        )
    about = [("weights", DUMMY_WEIGHTS)] if result["dummy_weights"] else []
    about += [("draft", result["draft"]), ("target", result["target"])]
    if (calibration := result["calibration"]) is not None:
        about.append(("confidence", calibration_text(calibration)))
    return [table, _two_columns("", about)]


def calibration_text(calibration: dict[str, Any]) -> str:
    """The calibration of the confidence head in words."""
    return (
        f"off by {calibration['error']:.1%}; its logit divided by {calibration['temperature']:.2f}, "
        f"fitted on half of the prompts: {calibration['error_of_rest']:.1%} → "
        f"{calibration['error_fitted_on_rest']:.1%} on the others"
    )
