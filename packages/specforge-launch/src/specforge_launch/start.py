"""Starts a run: what must hold of its output folder before, and what is shown after."""

from typing import Any

from rich.console import Console

from specforge_capture.prompts.checksum import require_checksum
from specforge_config.deployment import Disaggregated
from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_launch.plan import RunPlan
from specforge_launch.run_folder import RunFolder
from specforge_launch.services import Role
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


def start(
    config: RunConfig, plan: RunPlan, node: int, out: Console, err: Console, role: Role | None = None
) -> int:
    """Run this node's part of a plan; the node of rank 0 then writes the report and shows the table.

    Returns:
        The exit code.

    Raises:
        ValueError: if the training file is not that of `data.sha256`, if `training.resume` and the folder
            disagree, if `node` is none of the run's, or if the folder is in use.
    """
    require_checksum(config.data)
    _require_place(config, plan, node, role)
    folder = RunFolder(config.folder)
    trains = role in (None, "consumer")
    if trains and config.training.resume == "never" and folder.has_checkpoint:
        raise ValueError(
            f"training.resume is never, but {folder.path} holds a checkpoint: set another name or output_dir"
        )
    if trains and config.training.resume == "required" and not folder.has_checkpoint:
        raise ValueError(f"training.resume is required, but {folder.path} holds no checkpoint")
    if config.dummy_weights:
        out.print(DUMMY_WEIGHTS, style="yellow", highlight=False)
    code = run_node(config, plan, node, out, err, role)
    if code == OK and node == 0 and trains:
        from specforge_launch.report import write_report

        with out.status("writing the report"):
            write_report(folder.path)
        summary = folder.read_summary()
        assert summary is not None, "a run that is done has written its summary"
        out.print(summary_table(summary))
    return code


def _require_place(config: RunConfig, plan: RunPlan, node: int, role: Role | None) -> None:
    """Check that a role on a node is a part of the run.

    Raises:
        ValueError: naming the parts that there are.
    """
    deployment = config.deployment
    if role is not None and not isinstance(deployment, Disaggregated):
        raise ValueError(f"--role is {role}, but deployment.mode is {deployment.mode}; required: no --role")
    if isinstance(deployment, Disaggregated):
        if role is not None and deployment.managed:
            raise ValueError(
                f"--role is {role}, but deployment.managed is true, which runs all roles; drop one"
            )
        if role is None and not deployment.managed:
            typed = (f"  {node.host}:  {line}" for node in plan.nodes for line in node.commands)
            raise ValueError(
                "a disaggregated run that is not managed is started by its roles:\n" + "\n".join(typed)
            )
        if role == "server":
            if node >= deployment.num_servers:
                raise ValueError(
                    f"--node-rank is {node}, required less than the {deployment.num_servers} of "
                    "deployment.servers.addresses"
                )
            return
    nodes = deployment.trainer.nnodes if role in (None, "consumer") else 1
    if node >= nodes:
        raise ValueError(f"--node-rank is {node}, required less than deployment.trainer.nnodes={nodes}")
