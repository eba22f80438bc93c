"""Shows a run while it lasts: a bar on a terminal, plain lines elsewhere.

Ranks write events to `progress.jsonl`: `{"stage": name, "step" or "done": so many, "total": of all, …}`. This
reads them.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from specforge_launch.show import first_step_text

STAGES = {
    "start": "starting the ranks",
    "prompts": "preparing prompts",
    "target": "loading the target",
    "join": "joining the ranks",
    "untrained": "measuring the untrained draft",
    "train": "training",
    "evaluate": "evaluating",
    "export": "exporting",
}
_PLAIN_SECONDS = 10.0


def numbers(event: dict[str, Any]) -> str:
    """The measured part of a training event: loss, τ, speed."""
    shown = {
        "loss": ("loss", "{:.3f}"),
        "tau_estimate": ("τ̂", "{:.2f}"),
        "samples_per_s": ("samples/s", "{:.1f}"),
    }
    present = ((name, style, event.get(key)) for key, (name, style) in shown.items())
    return "  ".join(f"{name} {style.format(value)}" for name, style, value in present if value is not None)


@contextmanager
def counting(console: Console, text: str) -> Generator[Callable[[int, int], None]]:
    """A bar, on a terminal; yields what is called with how much is done and how much there is."""
    with _bar(console) as bar:
        task = bar.add_task(text, total=None, text="")

        def count(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, text=f"{done}/{total}")

        yield count


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=28),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class View:
    """Draws events until it is closed."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self._console = console
        self._stage = ""
        self._last_line = 0.0
        self._seen: dict[str, Any] = {}
        self._task: TaskID | None = None
        self._bar = _bar(console)

    def __enter__(self) -> "View":
        """Start drawing."""
        self._bar.start()
        self.show({"stage": "start"})
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bar.stop()

    def show(self, event: dict[str, Any]) -> None:
        """Draw one event."""
        stage, step, total = event["stage"], event.get("done", event.get("step", 0)), event.get("total")
        if stage not in STAGES:
            return
        if "first_step_seconds" in event:
            self.message(f"seconds to the first step {first_step_text(event)}")
        if event.get("tau") is not None:
            return self.message(f"step {step}: τ {event['tau']:.2f} measured")
        self._seen = {**self._seen, **event} if stage == self._stage else event
        text = f"{step}/{total}  {numbers(self._seen)}".rstrip() if total else numbers(self._seen)
        if self._console.is_terminal:
            if stage != self._stage and self._task is not None:
                self._bar.remove_task(self._task)
                self._task = None
            if self._task is None:
                self._task = self._bar.add_task(STAGES[stage], total=total, completed=step, text=text)
            self._bar.update(self._task, completed=step, total=total, text=text)
        elif stage != self._stage or step == total or time.monotonic() - self._last_line > _PLAIN_SECONDS:
            self._console.print(f"{STAGES[stage]}  {text}".rstrip(), highlight=False)
            self._last_line = time.monotonic()
        self._stage = stage

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)
