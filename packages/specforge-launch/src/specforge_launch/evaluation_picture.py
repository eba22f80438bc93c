"""The picture of an evaluation: τ of each prompt set, acceptance by slot, calibration of the confidence."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_launch.charts import COLORS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SERIES = [COLORS[name] for name in ("teal", "blue", "amber", "violet", "grey")]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what `measure_draft` returned."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "text.color": "#1e293b"}):
        figure = Figure(figsize=(14, 4.2), layout="constrained", facecolor="white")
        lengths, slots, calibration = figure.subplots(1, 3)
        _lengths(lengths, result["sets"])
        _slots(slots, [row for row in result["sets"] if row["temperature"] == result["temperature"]])
        _reliability(calibration, result["calibration"])
        figure.savefig(path, dpi=130)


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def _lengths(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["name"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    width = 0.8 / len(temperatures)
    for index, temperature in enumerate(temperatures):
        own = {row["name"]: row for row in rows if row["temperature"] == temperature}
        heights = [own[name]["tau"] or 0.0 for name in names]
        places = [at + (index - (len(temperatures) - 1) / 2) * width for at in range(len(names))]
        color = _SERIES[index % len(_SERIES)]
        bars = axes.bar(places, heights, width * 0.92, color=color, label=_temperature(temperature))
        axes.bar_label(bars, [f"{height:.2f}" for height in heights], padding=2, fontsize=8)
    axes.axhline(1, color=COLORS["grey"], linewidth=1, linestyle=":")
    axes.set_xticks(range(len(names)), names)
    axes.set(title="Acceptance length τ", ylabel="tokens a round")
    axes.margins(y=0.18)
    axes.legend(loc="upper right", ncols=len(temperatures), fontsize=9)


def _slots(axes: "Axes", rows: list[dict[str, Any]]) -> None:
    for index, row in enumerate(rows):
        shares = [(slot, share) for slot, share in enumerate(row["accept_by_slot"], 1) if share is not None]
        if shares:
            color = _SERIES[index % len(_SERIES)]
            axes.plot(*zip(*shares, strict=True), label=row["name"], marker="o", color=color)
    axes.set(title="Acceptance by slot", xlabel="slot of the block", ylabel="share of rounds", ylim=(0, 1))
    axes.set_xticks(range(1, 1 + max((len(row["accept_by_slot"]) for row in rows), default=0)))
    axes.legend(fontsize=9)


def _reliability(axes: "Axes", calibration: dict[str, Any] | None) -> None:
    axes.set(title="Confidence", xlabel="predicted acceptance", ylabel="accepted", xlim=(0, 1), ylim=(0, 1))
    if calibration is None:
        axes.text(0.5, 0.5, "no confidence head, or too few prompts", ha="center", transform=axes.transAxes)
        return
    bins = calibration["bins"]
    largest = max(row["count"] for row in bins)
    axes.plot([0, 1], [0, 1], color=COLORS["grey"], linewidth=1, linestyle="--")
    points = [[row[key] for row in bins] for key in ("confidence", "accepted")]
    axes.plot(*points, color=COLORS["blue"], alpha=0.5)
    axes.scatter(*points, s=[20 + 180 * row["count"] / largest for row in bins], color=COLORS["blue"])
    text = (
        f"error {calibration['error']:.1%}\n"
        f"held out {calibration['error_of_rest']:.1%} → {calibration['error_fitted_on_rest']:.1%}"
        f" at temperature {calibration['temperature']:.2f}"
    )
    axes.text(0.03, 0.97, text, va="top", transform=axes.transAxes, fontsize=9)
