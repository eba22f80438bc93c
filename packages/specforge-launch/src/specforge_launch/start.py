"""Starts a run: what must hold of its output folder before, and what is shown after."""

from typing import Any

from rich.console import Console

from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_launch.plan import RunPlan
from specforge_launch.run_folder import RunFolder
from specforge_launch.show import DUMMY_WEIGHTS, summary_table
from specforge_launch.supervise import OK, run_node


def finished_summary(config: RunConfig) -> dict[str, Any] | None:
    """The summary of this very run, where it has finished before and is not asked to start anew."""
    folder = RunFolder(config.folder)
    if config.training.resume == "never" or not (folder.summary.is_file() and folder.resolved.is_file()):
        return None
    before, now = (
        c.model_dump(exclude={"training": {"resume"}}) for c in (load_run(folder.resolved), config)
    )
    return folder.read_summary() if before == now else None


def start(config: RunConfig, plan: RunPlan, node: int, out: Console, err: Console) -> int:
    """Run this node's part of a plan; node 0 then writes the report and shows the table.

    Returns:
        The exit code.

    Raises:
        ValueError: if `training.resume` and the folder disagree, if `node` is none of the run's, or if the
            folder is in use.
    """
    nodes = config.deployment.trainer.nnodes
    if node >= nodes:
        raise ValueError(f"--node-rank is {node}, required less than deployment.trainer.nnodes={nodes}")
    folder = RunFolder(config.folder)
    if config.training.resume == "never" and folder.has_checkpoint:
        raise ValueError(
            f"training.resume is never, but {folder.path} holds a checkpoint: set another name or output_dir"
        )
    if config.training.resume == "required" and not folder.has_checkpoint:
        raise ValueError(f"training.resume is required, but {folder.path} holds no checkpoint")
    if config.dummy_weights:
        out.print(DUMMY_WEIGHTS, style="yellow", highlight=False)
    code = run_node(config, plan, node, out, err)
    if code == OK and node == 0:
        from specforge_launch.report import write_report

        with out.status("writing the report"):
            write_report(folder.path)
        summary = folder.read_summary()
        assert summary is not None, "a run that is done has written its summary"
        out.print(summary_table(summary))
    return code
