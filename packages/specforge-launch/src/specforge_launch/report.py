"""One self-contained HTML page of a run: its table, its curves, its configuration.

Charts are inline SVG by matplotlib. Their text and axes take the page's colour, so that the page reads in
light and dark.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_launch.charts import COLORS, svg
from specforge_launch.page import PAGE
from specforge_launch.run_folder import RunFolder
from specforge_launch.show import DUMMY_WEIGHTS, summary_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]


def write_report(path: str | Path) -> Path:
    """Write `report.html` into a run's folder from what it holds so far.

    Returns:
        The page's path.

    Raises:
        ValueError: if the folder holds no metrics.
    """
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        raise ValueError(
            f"no {folder.metrics.name} in {folder.path}; required: the folder of a run that has trained"
        )
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    summary = folder.read_summary() or {}
    configuration = folder.resolved.read_text() if folder.resolved.is_file() else ""
    folder.report.write_text(render(rows, summary, configuration, title=folder.path.name))
    return folder.report


def render(rows: Rows, summary: dict[str, Any], configuration: str, title: str) -> str:
    """The page.

    Args:
        rows: lines of `metrics.jsonl`.
        summary: `summary.json`; empty for a run that has not ended.
        configuration: the resolved recipe.
        title: name of the run.
    """
    train = [row for row in rows if "loss" in row]
    dummy = any(row.get("dummy_weights") for row in rows)
    measured = _measured(rows, summary)
    charts: list[tuple[str, str, Callable[[Axes], None]]] = [
        (
            "Acceptance length τ",
            "measured by speculative decoding; estimated on the rows that are trained on",
            lambda a: _tau(a, train, measured),
        ),
        (
            "Acceptance by slot",
            "share of drafted tokens the target accepts",
            lambda a: _slots(a, rows, summary),
        ),
        ("Loss", "terms as they are weighted per slot, averaged over the world", lambda a: _loss(a, train)),
        ("Where a step's time goes", "share of the wall clock", lambda a: _shares(a, train)),
        ("Learning rate", "and the gradient's norm before clipping", lambda a: _rate(a, train)),
    ]
    figures = "\n".join(
        f"<figure><figcaption><b>{escape(name)}</b><span>{escape(text)}</span></figcaption>{svg(draw)}</figure>"
        for name, text, draw in charts
    )
    table = "\n".join(f"<tr><th>{escape(n)}</th><td>{escape(v)}</td></tr>" for n, v in summary_rows(summary))
    return PAGE.format(
        title=escape(title),
        note=f'<p class="warning">{escape(DUMMY_WEIGHTS)}</p>' if dummy else "",
        tiles=_tiles(summary),
        figures=figures,
        table=f"<section><h2>The run</h2><table>{table}</table></section>" if table else "",
        configuration=escape(configuration),
    )


def _line(axes: "Axes", rows: Rows, key: str, label: str, color: str, **style: Any) -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, color=COLORS[color], **style)


def _legend(axes: "Axes", **place: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(**place)


def _tau(axes: "Axes", train: Rows, measured: Rows) -> None:
    _line(axes, train, "tau_estimate", "estimate while training", "blue", alpha=0.75)
    _line(axes, measured, "eval/tau", "measured", "amber", marker="o", linestyle="--")
    for row in measured:
        point, text = (row["step"], row["eval/tau"]), f"{row['eval/tau']:.2f}"
        axes.annotate(text, point, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set(xlabel="step", ylabel="tokens a round")
    axes.margins(y=0.18)
    if axes.get_legend_handles_labels()[0]:
        axes.figure.legend(loc="outside upper right", ncols=2)


def _measured(rows: Rows, summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Evaluations by step: those while training, and those of all prompts before and after it."""
    points = {row["step"]: row for row in rows if "eval/tau" in row}
    if summary.get("tau_untrained") is not None:
        points[0] = {"step": 0, "eval/tau": summary["tau_untrained"]}
    if summary.get("tau_trained") is not None:
        points[summary["steps"]] = {"step": summary["steps"], "eval/tau": summary["tau_trained"]}
    return [points[step] for step in sorted(points)]


def _slots(axes: "Axes", rows: Rows, summary: dict[str, Any]) -> None:
    shares = {
        "untrained": summary.get("accept_by_slot_untrained"),
        "trained": summary.get("accept_by_slot") or _latest_slots(rows),
    }
    for place, color, (name, values) in zip((-0.2, 0.2), ("grey", "teal"), shares.items(), strict=True):
        heights = [share or 0.0 for share in values or ()]
        at = [slot + 1 + place for slot in range(len(heights))]
        bars = axes.bar(at, heights, 0.36, color=COLORS[color], label=name)
        axes.bar_label(bars, fmt="{:.0%}", fontsize=8, padding=2)
    axes.set(xlabel="slot of the block", ylim=(0, 1.12))
    axes.set_xticks(range(1, 1 + max(len(values or ()) for values in shares.values())))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(visible=False, axis="x")
    _legend(axes, loc="upper right")


def _latest_slots(rows: Rows) -> list[float]:
    """Acceptance by slot of the latest evaluation while training."""
    row = next((row for row in reversed(rows) if "eval/tau" in row), {})
    return [row[f"eval/accept/{k}"] for k in range(len(row)) if f"eval/accept/{k}" in row]


def _loss(axes: "Axes", train: Rows) -> None:
    _line(axes, train, "loss", "loss", "blue")
    _line(axes, train, "loss/ce", "cross-entropy", "amber", linewidth=1.1)
    _line(axes, train, "loss/l1", "L1", "teal", linewidth=1.1)
    _line(axes, train, "loss/confidence", "confidence", "violet", linewidth=1.1)
    axes.set(xlabel="step", yscale="log")
    _plain_numbers(axes)
    _legend(axes, ncols=2)


def _plain_numbers(axes: "Axes") -> None:
    """Write a logarithmic axis as 0.5, 1, 2 rather than as powers."""
    from matplotlib.ticker import LogLocator

    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def _shares(axes: "Axes", train: Rows) -> None:
    keys = {"capture": "perf/capture_share", "train": "perf/train_share", "bubble": "perf/bubble_fraction"}
    rows = [row for row in train if all(key in row for key in keys.values())]
    if rows:
        shares = [[row[key] for row in rows] for key in keys.values()]
        colors = [COLORS[name] for name in ("amber", "blue", "grey")]
        axes.stackplot([row["step"] for row in rows], shares, labels=list(keys), colors=colors, alpha=0.85)
        axes.figure.legend(loc="outside upper right", ncols=3)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.margins(x=0)
    axes.yaxis.set_major_formatter("{x:.0%}")


def _rate(axes: "Axes", train: Rows) -> None:
    _line(axes, train, "lr", "learning rate", "blue")
    axes.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
    norm = axes.twinx()
    _line(norm, train, "grad_norm", "gradient norm", "grey", linewidth=1, alpha=0.8)
    norm.set(ylabel="gradient norm", yscale="log")
    _plain_numbers(norm)
    norm.grid(visible=False)
    if train:
        axes.figure.legend(loc="outside upper right", ncols=2)


def _tiles(summary: dict[str, Any]) -> str:
    if not summary:
        return '<p class="note">This run has not ended yet.</p>'
    tiles = [("samples/s", f"{summary['samples_per_s']:.1f}"), ("seconds", f"{summary['seconds']:.0f}")]
    if summary.get("tau_trained") is not None:
        identical, total = summary["lossless_identical"], summary["lossless_total"]
        tiles[:0] = [
            ("τ untrained", f"{summary['tau_untrained']:.2f}"),
            ("τ trained", f"{summary['tau_trained']:.2f}"),
            ("outputs identical", f"{identical} of {total}"),
        ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f'<div class="tiles">{cells}</div>'
