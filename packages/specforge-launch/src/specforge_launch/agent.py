"""torchrun's agent as a child of the launcher: `python -m specforge_launch.agent <exits> <arguments>`.

It starts this node's ranks, waits for them and ends all when one fails. How each failed rank ended is written
to the file `exits`, for the launcher knows only this process.
"""

import json
import os
import sys
import time

from specforge_launch.lifeline import die_with_parent


def main(exits: str, arguments: list[str]) -> int:
    """Run the agent until all ranks have ended.

    Args:
        exits: file that names how ranks failed: {rank: exit code}, negative for a signal.
        arguments: what torchrun is called with.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import config_from_args, elastic_launch, parse_args

    config, command, command_arguments = config_from_args(parse_args(arguments))
    try:
        elastic_launch(config=config, entrypoint=command)(*command_arguments)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        with open(f"{exits}.new", "w") as file:
            json.dump({"time": time.time(), "exit_codes": codes}, file)
        os.replace(f"{exits}.new", exits)
        return 1
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.argv[1], sys.argv[2:]))
