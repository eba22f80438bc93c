"""The `specforge-launch` command. Each command parses and validates before anything heavy is imported.

Errors of the user (ValueError) are one message on stderr and exit code 2; Ctrl-C exits 130.
"""

import json
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specforge_launch import recipe as recipes

if TYPE_CHECKING:
    from specforge_config.run import RunConfig

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Train draft models for speculative decoding.

    [bold]Start here[/bold]

      specforge-launch recipes                        the shipped recipes
      specforge-launch plan quickstart                what a run would do, and the memory it takes
      specforge-launch run quickstart                 train, measure, export
      specforge-launch run quickstart optimizer.lr=1e-3 training.max_steps=50

    A recipe is a YAML file or the name of a shipped one. Override any setting as section.key=value.""",
)
recipes_app = typer.Typer(help="List the shipped recipes, show one, or copy one to start from.")
app.add_typer(recipes_app, name="recipes", rich_help_panel="Recipes")
out, err = Console(), Console(stderr=True)

RecipeArgument = Annotated[
    str, typer.Argument(help="Path of a recipe, or the name of a shipped one.", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to override, as section.key=value.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except ValueError as error:
        err.print("[bold red]error:[/bold red] ", end="")
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def _load(recipe: str, overrides: list[str] | None) -> "RunConfig":
    from specforge_config.loading import load_run

    return load_run(recipes.find(recipe), overrides or [])


def _load_with_target(recipe: str, overrides: list[str] | None) -> "RunConfig":
    """The run with a target that its parts can read; the first time, a GGUF file is converted."""
    from specforge_capture.targets.gguf import with_saved_target

    config = _load(recipe, overrides)
    with err.status("reading the target's GGUF file") if config.target.gguf_file else nullcontext():
        return with_saved_target(config)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


@app.command(rich_help_panel="Runs")
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    node_rank: Annotated[
        int, typer.Option(min=0, help="Which of the run's nodes this is; with --role server, which server.")
    ] = 0,
    role: Annotated[
        Literal["store", "server", "producer", "consumer"] | None,
        typer.Option(help="The part of a disaggregated run that this node runs, unless the run is managed."),
    ] = None,
    resume: Annotated[
        Literal["auto", "never", "required"] | None,
        typer.Option(help="Go on from the newest checkpoint: where there is one, never, or fail without."),
    ] = None,
) -> None:
    """Train a draft: prepare prompts, measure, train, measure again, export.

    Ctrl-C saves a checkpoint and stops; the same command goes on from it. Pressed twice, it kills.

      specforge-launch run recipes/quickstart.yaml
      specforge-launch run quickstart deployment.trainer.nproc_per_node=2
      specforge-launch run my.yaml --node-rank 1      on the second of several nodes
      specforge-launch run my.yaml --role server      one part of a disaggregated run; plan names all
    """
    from specforge_launch.plan import make_plan
    from specforge_launch.show import summary_table
    from specforge_launch.start import finished_summary, start

    config = _load_with_target(
        recipe, [*(overrides or []), *([f"training.resume={resume}"] if resume else [])]
    )
    plan = make_plan(config, shlex.join([recipe, *(overrides or [])]))
    if role not in ("store", "server") and (summary := finished_summary(config)):
        out.print("this run has finished before; set name or output_dir for a new one\n", highlight=False)
        out.print(summary_table(summary))
        return
    raise typer.Exit(start(config, plan, node_rank, out, err, role))


@app.command(rich_help_panel="Runs")
def plan(recipe: RecipeArgument, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Show what a run would do: processes, islands, engine, memory, steps, outputs. Starts nothing.

    Of a disaggregated run it also shows what passes through the store, and what is typed on each node.

      specforge-launch plan quickstart
      specforge-launch plan quickstart deployment.trainer.nproc_per_node=2 --json
      specforge-launch plan quickstart-disaggregated
    """
    from specforge_launch.plan import make_plan
    from specforge_launch.show import plan_tables

    made = make_plan(_load_with_target(recipe, overrides), shlex.join([recipe, *(overrides or [])]))
    if as_json:
        _print_json(made.to_json())
        return
    for table in plan_tables(made):
        out.print(table, "")


@app.command(rich_help_panel="Runs")
def validate(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Check a recipe: every key, every value, and how they fit together.

    specforge-launch validate my.yaml
    """
    from specforge_config.unbuilt import not_implemented

    config = _load(recipe, overrides)
    for line in not_implemented(config):
        err.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    out.print(f"{recipe}: valid", highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Data")
def prepare(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Build the prompt cache of a recipe and show what is in it, with one sample and its mask in colour.

    specforge-launch prepare quickstart
    specforge-launch prepare my.yaml data.supervise=last_turn
    """
    from specforge_launch.prepare import prepare as build

    build(_load_with_target(recipe, overrides), out)


@app.command(rich_help_panel="Results")
def evaluate(
    source: Annotated[
        str, typer.Argument(help="A recipe, a run's folder or an exported draft.", show_default=False)
    ],
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="A checkpoint's name, such as step-000120; default: the latest.")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="Prompt files; default: the recipe's evaluation.prompts.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Target folder, for an exported draft without a run.")
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Sampling temperature, repeatable; default: evaluation.temperatures."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that decode side by side on the device.")
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for evaluation.json and .png; default: evaluation/ in the run's folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a draft by speculative decoding: τ and acceptance of every prompt file, speed-up, calibration.

    Greedy outputs are compared with the target's own one by one; sampled ones keep its distribution by the
    rejection rule. Ctrl-C ends the measurement with what was decoded until then.

      specforge-launch evaluate quickstart
      specforge-launch evaluate outputs/quickstart --prompts gsm8k.jsonl --prompts mt-bench.jsonl
      specforge-launch evaluate my-draft/ --target my-target/ --prompts eval.jsonl --temperature 0 --json
    """
    from specforge_launch.evaluation import Source, measure_draft, result_folder, save_measurement
    from specforge_launch.progress import counting
    from specforge_launch.show import measurement_tables

    settings = [f"evaluation.temperatures={json.dumps(temperature)}"] if temperature else []
    draft = Source(source, (*(overrides or []), *settings), checkpoint, target, tuple(prompts or ()))
    with counting(err, "decoding") as progress:
        result = measure_draft(draft, workers, progress)
    decoded, planned = result["conversations"]["decoded"], result["conversations"]["planned"]
    if decoded < planned:
        err.print(f"stopped after {decoded} of {planned} conversations: this is what they gave")
    folder = output or result_folder(source, draft.overrides)
    written = [] if folder is None else save_measurement(result, folder)
    if as_json:
        _print_json(result)
        return
    for table in measurement_tables(result):
        out.print(table)
    for path in written:
        out.print(str(path), style="dim", highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Results")
def export(
    source: Annotated[
        str,
        typer.Argument(help="A recipe or run's folder; to check, an exported draft.", show_default=False),
    ],
    overrides: Overrides = None,
    layout: Annotated[
        Literal["sglang", "speculators"], typer.Option("--format", help="Whose layout is written.")
    ] = "sglang",
    checkpoint: Annotated[str | None, typer.Option(help="A checkpoint's name; default: the latest.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Where to write; default: export/ or export-speculators/ in the run's folder."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check what was exported before.")] = False,
    target: Annotated[
        str | None,
        typer.Option(help="Target folder, for the check of an exported draft outside of a run's folder."),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="What a speculators export calls the target, as on a hub; default: its folder."),
    ] = None,
) -> None:
    """Write a checkpoint as SGLang or speculators reads it, and check every weight of what was written.

    --check refuses a draft whose tensors are missing, unexpected, misshapen, of another type than its
    config.json says or not finite, or whose config.json an engine would read differently.

      specforge-launch export quickstart
      specforge-launch export outputs/quickstart --checkpoint step-000120 --output my-draft
      specforge-launch export outputs/quickstart --format speculators
      specforge-launch export my-draft --check --target my-target
    """
    from specforge_launch.drafts import check_exported, check_folder, export_checkpoint, find_run
    from specforge_launch.resolve import resolve

    if (Path(source) / "config.json").is_file():
        if not check:
            raise ValueError(
                f"{source} is an exported draft; required: its run's folder or recipe, or --check to check it"
            )
        _refuse_unused(
            "the check of an exported draft", checkpoint=checkpoint, output=output, verifier=verifier
        )
        if overrides:
            raise ValueError(f"{', '.join(overrides)}: an exported draft has no settings; required: its run")
        folder = Path(source)
        check_folder(folder, target)
    else:
        _refuse_unused("a run, whose target is target.path", target=target)
        if check:
            _refuse_unused("the check of a run's export", checkpoint=checkpoint, verifier=verifier)
        if layout == "sglang":
            _refuse_unused("an export for SGLang, which names no target", verifier=verifier)
        config = find_run(source, overrides or [])
        default = "export" if layout == "sglang" else f"export-{layout}"
        folder = output or Path(config.folder) / default
        if check:
            check_exported(resolve(config), folder)
        else:
            export_checkpoint(config, checkpoint, folder, layout, verifier)
    out.print(f"{folder}: {'complete' if check else 'exported'}", highlight=False, soft_wrap=True)


def _refuse_unused(what: str, **options: object) -> None:
    if given := [f"--{name}" for name, value in options.items() if value is not None]:
        raise ValueError(f"{', '.join(given)}: not used by {what}; required: leave out")


@app.command(rich_help_panel="Results")
def report(folder: Annotated[Path, typer.Argument(help="A run's folder.", show_default=False)]) -> None:
    """Write a run's curves and table as one HTML page; also while the run lasts.

    specforge-launch report outputs/quickstart
    """
    from specforge_launch.report import write_report

    out.print(str(write_report(folder)), highlight=False, soft_wrap=True)


@app.command(rich_help_panel="Recipes")
def schema() -> None:
    """Print the JSON schema of a recipe, for editors.

    specforge-launch schema > recipe.schema.json
    """
    from specforge_config.loading import json_schema

    _print_json(json_schema())


@app.command(rich_help_panel="Machine")
def doctor(folder: Annotated[str, typer.Argument(help="Where runs will write.")] = ".") -> None:
    """Examine this machine: python, torch, GPUs, packages, disk, shared memory, ports, caches."""
    from specforge_launch.doctor import examine

    table = Table(show_header=False, box=None, pad_edge=False)
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    findings = examine(folder)
    for finding in findings:
        text = f"{finding.found}\n[dim]{finding.advice}[/dim]" if finding.advice else finding.found
        table.add_row(f"[{styles[finding.level]}]{finding.level}[/]", finding.name, text)
    out.print(table)
    raise typer.Exit(int(any(finding.level == "fail" for finding in findings)))


@recipes_app.callback(invoke_without_command=True)
def list_recipes(context: typer.Context) -> None:
    """List the shipped recipes."""
    if context.invoked_subcommand is None:
        for name, path in recipes.shipped().items():
            out.print(Text(name, style="bold"))
            out.print(Padding(Text(recipes.summary(path)), (0, 0, 0, 2), expand=False))


@recipes_app.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.", show_default=False)],
) -> None:
    """Print a recipe."""
    print(recipes.find(name).read_text(), end="")


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="Folder to copy into.")] = Path("."),
) -> None:
    """Copy a recipe, with the files it names, to start your own from."""
    for path in recipes.copy(name, folder):
        out.print(os.fspath(path), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
