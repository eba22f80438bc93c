"""What each rank runs: `python -m specforge_launch.worker <resolved.yaml> <start time>`, under torchrun."""

import os
import sys
from pathlib import Path

from specforge_launch.lifeline import die_with_parent


def main(resolved: str, started: str) -> None:
    """Send this rank's output to its log, then run; a failure is recorded where the launcher looks for it."""
    from specforge_config.loading import load_run

    config, rank = load_run(resolved), int(os.environ["RANK"])
    log = os.open(
        Path(config.folder) / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, 1)
    os.dup2(log, 2)

    from specforge_train.abort import abort_on_error

    with abort_on_error(Path(config.folder), rank, int(os.environ["WORLD_SIZE"])):
        if config.deployment.mode == "disaggregated":
            from specforge_launch.disaggregated import run
        else:
            from specforge_launch.colocated import run
        run(config, float(started))


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
