"""The `specforge-capture` command: each of its commands is a module of `commands`, added here.

Errors of the user (ValueError) are one message on stderr and exit code 2; Ctrl-C exits 130.
"""

import sys

import typer
from rich.console import Console

from specforge_capture.commands.patch import patch_app
from specforge_capture.commands.regenerate import regenerate
from specforge_capture.commands.serve import serve

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Capture a target's hidden states for draft models, and what capture servers need.",
)
err = Console(stderr=True)


@app.callback()
def commands() -> None:
    """Keeps the names of commands, also while there is one alone."""


app.command()(regenerate)
app.command()(serve)
app.add_typer(patch_app, name="patch")


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except ValueError as error:
        err.print("[bold red]error:[/bold red] ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
