"""The `specforge-kernels` command: `status` prints which kernels run here and why, `bench` times them."""

import argparse
import sys
from collections.abc import Sequence
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
    bench = commands.add_parser("bench", help="time each operation, forward and backward, on random data")
    for command in (status, bench):
        command.add_argument("--device", help="cpu or cuda; default: cuda where there is one")
    bench.add_argument("--lengths", type=int, nargs="+", default=[256, 1024], help="tokens of a sequence")
    bench.add_argument("--anchors", type=int, default=512, help="anchors of a sequence at most")
    bench.add_argument("--block", type=int, default=7, help="slots of a block")
    bench.add_argument(
        "--hidden", type=int, default=4096, help="hidden size; heads are of 128, grouped by four"
    )
    bench.add_argument("--vocabulary", type=int, default=151936)
    bench.add_argument("--seed", type=int, default=0)
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
    else:
        from .bench.parts import PartShapes, print_parts

        shapes = PartShapes(arguments.anchors, arguments.block, arguments.hidden, arguments.vocabulary)
        print_parts(shapes, arguments.lengths, device, arguments.seed)
    return 0


def print_status(device: "torch.device") -> None:
    """Device, torch and each operation's choice."""
    import torch

    from .inductor import keep_aten_gemms
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
        f"compiled GEMM candidates: {keep_aten_gemms()} - ATEN kept, for lengths that every template rejects"
    )
