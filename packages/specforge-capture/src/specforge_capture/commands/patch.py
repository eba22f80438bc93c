"""`specforge-capture patch`: see, check, apply and revert the patches of an installed SGLang."""

import errno
from pathlib import Path
from typing import Annotated

import typer

from specforge_capture.patching import Installation, Known, find_sglang

patch_app = typer.Typer(
    no_args_is_help=True,
    help="""Patch an installed SGLang, where plugin hooks do not reach: its kernels, or plugins switched off.

    The files of the installation are changed in place. A server that runs keeps what it has loaded.""",
)

Site = Annotated[
    Path | None,
    typer.Option(
        help="The site-packages folder that holds sglang. [default: this interpreter's]",
        show_default=False,
        exists=True,
        file_okay=False,
    ),
]


@patch_app.command()
def status(site: Site = None) -> None:
    """Show the installed SGLang, its patches, and the state of each file they touch."""
    installation = find_sglang(site)
    states = installation.states()
    print(f"sglang {installation.version} in {installation.root}: {_summary(installation)}")
    for patch in installation.patch_set.patches:
        print(f"  {patch.name}: {patch.summary}")
    for path, state in states.items():
        print(f"  {state:8} {path}")


@patch_app.command()
def check(site: Site = None) -> None:
    """Do what `apply` does, short of writing: fails where the patches cannot be applied."""
    installation = find_sglang(site)
    changes = installation.changes("patched")
    what = f"files to change: {len(changes)}" if changes else "nothing to do"
    print(f"sglang {installation.version} in {installation.root}: {what}")


@patch_app.command()
def apply(site: Site = None) -> None:
    """Apply all patches; completes an apply or a revert that was cut short."""
    _bring(find_sglang(site), "patched")


@patch_app.command()
def revert(site: Site = None) -> None:
    """Restore the released files, byte for byte; also after an apply that was cut short."""
    _bring(find_sglang(site), "stock")


def _bring(installation: Installation, wanted: Known) -> None:
    try:
        changed = installation.bring(wanted)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise ValueError(
            f"{installation.root} cannot be changed, and is as it was: {error}. Run this as its owner, or on "
            "a copy named with --site"
        ) from error
    what = f"files changed: {len(changed)}" if changed else "nothing to do"
    print(f"sglang {installation.version} in {installation.root}: {_summary(installation)}, {what}")


def _summary(installation: Installation) -> str:
    states = set(installation.states().values())
    if states <= {"stock"}:
        return "not patched"
    if states <= {"patched"}:
        return "patched"
    if states <= {"stock", "patched"}:
        return "partly patched (a run was cut short: apply or revert)"
    return "not as released (reinstall it)"
