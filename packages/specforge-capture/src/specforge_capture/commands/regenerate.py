"""`specforge-capture regenerate`: what it is told and what it shows."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from specforge_capture.regeneration.run import Report

out, err = Console(), Console(stderr=True)
_QUIET_SECONDS = 15.0


def regenerate(
    recipe: Annotated[
        str, typer.Argument(help="Path of a recipe, or the name of a shipped one.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to override, as section.key=value.", show_default=False),
    ] = None,
) -> None:
    """Answer prompts with the target, to train on what it really writes.

    The section [bold]regeneration[/bold] of the recipe names the prompts, the output and the sampling. A
    conversation is answered turn by turn, each behind the target's own earlier answers. Ctrl-C keeps what is
    done, and the same command goes on from there.

      specforge-capture regenerate my.yaml
      specforge-capture regenerate smollm2-135m-dspark
      specforge-capture regenerate my.yaml regeneration.temperature=1 regeneration.output=data/sampled.jsonl
      specforge-capture regenerate my.yaml target.backend=sglang
    """
    from specforge_capture.http_client import RequestFailed, RequestRefused, ServerDown
    from specforge_capture.regeneration.journal import manifest_path, output_path
    from specforge_config.loading import load_run
    from specforge_config.recipes import declared, find

    config = load_run(find(recipe, declared()), overrides or [])
    output = output_path(config)
    try:
        with _progress() as report:
            from specforge_capture.regeneration.run import regenerate as answer
            from specforge_capture.sglang.answer_servers import require_sglang
            from specforge_capture.targets.gguf import with_saved_target

            if config.target.backend == "sglang" and not config.regeneration.servers:
                require_sglang()
                err.print(f"SGLang writes to {output}.server*.log", highlight=False, soft_wrap=True)
            manifest, before = answer(with_saved_target(config), report)
    except KeyboardInterrupt:
        err.print(f"stopped; {_kept(output)}", soft_wrap=True)
        sys.exit(130)
    except (ServerDown, RequestFailed, RequestRefused) as error:
        servers = "regeneration.servers: " if config.regeneration.servers else ""
        err.print(f"error: {servers}{error}\n{_kept(output)}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    if before:
        out.print("these prompts have been answered before, under the same settings\n", highlight=False)
    out.print(_table(manifest, output, manifest_path(output)))
    for row in manifest["dropped"][:5]:
        out.print(f"dropped {row['id']}: {row['reason']}", style="yellow", markup=False, highlight=False)


def _kept(output: Path) -> str:
    from specforge_capture.regeneration.journal import partial_path

    partial = partial_path(output)
    if not partial.is_file() or partial.read_bytes().count(b"\n") < 2:
        return "nothing was answered yet"
    return f"{partial} keeps what is done: the same command goes on"


@contextmanager
def _progress() -> "Generator[Report]":
    """Shows rows, tokens a second and the time left: a bar on a terminal, else a line now and then."""
    started = shown = time.monotonic()
    first: int | None = None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("loading the target", total=None)

        def report(done: int, total: int, tokens: int) -> None:
            nonlocal started, shown, first
            now = time.monotonic()
            if first is None:  # the target is there
                first, started = done, now
            rate = tokens / max(now - started, 1e-9)
            bar.update(task, completed=done, total=total, description=f"{tokens} tokens, {rate:.0f}/s")
            if err.is_terminal or now - shown < _QUIET_SECONDS:
                return
            shown = now
            left = (now - started) * (total - done) / (done - first) if done > first else None
            ahead = "" if left is None else f", about {left:.0f} s left"
            err.print(f"{done} of {total} rows, {rate:.0f} tokens/s{ahead}", highlight=False)

        if not err.is_terminal:
            err.print("loading the target", highlight=False)
        yield report


def _table(manifest: dict[str, Any], output: Path, manifest_file: Path) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {
        "rows": f"{manifest['rows']}: {manifest['answered']} answered, {len(manifest['dropped'])} dropped",
        "answers": f"{manifest['answers']} of {manifest['answer_tokens']} tokens",
        "cut at the limit": f"{manifest['length_limited']} rows",
        "inexact": f"{manifest['inexact']} rows whose text gives other tokens than the target wrote",
        "speed": f"{manifest['tokens_per_s']} tokens/s; {manifest['seconds']} s, loading the target included",
        "output": str(output),
        "sha256": manifest["sha256"],
        "manifest": str(manifest_file),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
