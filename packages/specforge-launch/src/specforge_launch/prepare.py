"""Builds a recipe's prompt cache and shows what is in it."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from specforge_capture.prompts.samples import PromptReport
from specforge_capture.targets.base import PromptRow
from specforge_config.run import RunConfig
from specforge_launch.resolve import resolve

_SHOWN_REASONS = 10


def prepare(config: RunConfig, out: Console) -> None:
    """Build or open the cache, then print its report and one sample with its mask.

    Raises:
        ValueError: if no row can be used, or a file is missing.
    """
    resolved = resolve(config)
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("preparing prompts", total=1.0)
        prompts = resolved.prompts(lambda rows, share: progress.update(task, completed=share))
    out.print(report_table(prompts.report, str(prompts.path)))
    for reason, count in prompts.report.reasons().most_common(_SHOWN_REASONS):
        out.print(f"dropped {count}: {reason}", style="yellow", markup=False, highlight=False)
    sample = prompts[0]
    out.print(
        f"\n{sample.sample_id}: [bold black on green] supervised [/] [dim]not supervised[/]", highlight=False
    )
    out.print(masked_text(sample, resolved.renderer.decode))


def report_table(report: PromptReport, path: str) -> Table:
    """What became of the rows."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    dropped = len(report.dropped)
    rows = {
        "rows": f"{report.rows}: {report.kept} kept, {dropped} dropped, {report.truncated} truncated",
        "samples": f"{report.samples}",
        "tokens": f"{report.tokens}, {report.tokens / report.samples:.0f} a sample",
        "supervised": f"{report.supervised} tokens, {report.supervised / report.tokens:.0%}",
        "cache": path,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def masked_text(sample: PromptRow, decode: Callable[[list[int]], str]) -> Text:
    """A sample's text, its supervised runs marked.

    Args:
        sample: the sample.
        decode: token ids -> text.
    """
    text, start = Text(), 0
    mask = sample.loss_mask
    for stop in range(1, len(mask) + 1):
        if stop == len(mask) or mask[stop] != mask[start]:
            style = "black on green" if mask[start] else "dim"
            text.append(decode(sample.input_ids[start:stop].tolist()), style=style)
            start = stop
    return text
