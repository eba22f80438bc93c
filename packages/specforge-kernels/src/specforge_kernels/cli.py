"""The `specforge-kernels` command: `status` prints which kernels run here and why, `bench` times them."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def parser() -> argparse.ArgumentParser:
    """The command line; built without importing torch."""
    top = argparse.ArgumentParser(prog="specforge-kernels", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    status = commands.add_parser(
        "status", help="print the kernel of each operation on this machine, with its reason"
    )
    parts = commands.add_parser("parts", help="time each operation, forward and backward, on random data")
    bench = commands.add_parser(
        "bench",
        help="time whole DSpark steps at Qwen3-8B's shapes on random data, ours and the peers' in one run",
    )
    for command in (status, parts, bench):
        command.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    parts.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="tokens of a sequence")
    parts.add_argument("--anchors", type=int, default=512, help="anchors of a sequence at most")
    parts.add_argument("--block", type=int, default=7, help="slots of a block")
    parts.add_argument(
        "--hidden", type=int, default=4096, help="hidden size; heads are of 128, grouped by four"
    )
    parts.add_argument("--vocabulary", type=int, default=151936)
    parts.add_argument("--seed", type=int, default=0)
    bench.add_argument("--against", default="", help="peers, separated by commas: specforge, speculators")
    bench.add_argument("--wheels", type=Path, help="folder with the peers' wheels, unpacked")
    bench.add_argument(
        "--seeds", type=int, nargs="+", default=[7, 8], help="of the lengths, 24 and a table for each"
    )
    bench.add_argument(
        "--at", type=int, nargs="*", default=[256, 1024, 2048, 3911], help="lengths to time alone too"
    )
    bench.add_argument("--steps", help="module with our steps, where no package is installed")
    bench.add_argument("--only", help="of our steps, those to time, separated by commas")
    bench.add_argument("--json", type=Path, help="file for every figure")
    bench.add_argument(
        "--tiny", action="store_true", help="small shapes and eight lengths, to try it out on a CPU"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = parser().parse_args(argv)
    import torch

    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("specforge-kernels: --device cuda, but torch sees no CUDA device")
    if arguments.command == "status":
        print_status(device)
    elif arguments.command == "bench":
        run_bench(arguments, device)
    else:
        from .bench.parts import PartShapes, print_parts

        shapes = PartShapes(arguments.anchors, arguments.block, arguments.hidden, arguments.vocabulary)
        print_parts(shapes, arguments.lengths, device, arguments.seed)
    return 0


def run_bench(arguments: argparse.Namespace, device: "torch.device") -> None:
    """Measure and print whole steps."""
    from .bench.compare import TINY, as_json, compare, find_steps
    from .bench.steps import StepShapes, draw_lengths

    tiny = (4, 128) if arguments.tiny else ()
    try:
        steps = find_steps(arguments.steps)
        if arguments.only:
            steps = {name: steps[name] for name in arguments.only.split(",")}
        tables = compare(
            steps,
            [name for name in arguments.against.split(",") if name],
            arguments.wheels,
            lengths={seed: draw_lengths(seed, *tiny) for seed in arguments.seeds},
            shapes=TINY if tiny else StepShapes(),
            device=device,
            at=arguments.at,
        )
    except (ValueError, KeyError) as error:
        sys.exit(f"specforge-kernels: {error}")
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(tables, arguments.seeds), indent=2) + "\n")


def print_status(device: "torch.device") -> None:
    """Device, torch and each operation's choice."""
    import torch

    from .policy import choose_attention, choose_layer, choose_objective

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"device: {name}; torch {torch.__version__}")
    for operation, choice in (
        ("anchored_attention", choose_attention(device)),
        ("draft_layer", choose_layer(device)),
        ("dspark_objective", choose_objective(device)),
    ):
        print(f"{operation}: {choice.name} - {choice.reason}")
    print(
        "matrix products: aten - called as they are: Inductor compiles none, so there is no length for which "
        "it would reject all of its candidates (NoValidChoicesError)"
    )


if __name__ == "__main__":
    sys.exit(main())
