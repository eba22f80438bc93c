"""Time our DSpark training step on one GPU, and the peers' in the same run.

    python scripts/bench_dspark_step.py [--against specforge,speculators --wheels FOLDER] [--seed 7]
    [--profile 1024]

`FOLDER` holds the peers' wheels, unpacked. Shapes are Qwen3-8B's with random weights and features; weights,
gradients and moments are bf16, as the peers' are.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from specforge_config.draft import DSparkConfig
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.optim import OptimizerConfig
from specforge_kernels.bench.peers import find_peer
from specforge_kernels.bench.steps import (
    Sample,
    StepShapes,
    draw_lengths,
    draw_sample,
    measure_steps,
    print_reports,
    time_step,
)
from specforge_kernels.inductor import keep_aten_gemms
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftShape
from specforge_train.methods.dspark.method import DSpark
from specforge_train.optim import build_adamw, squared_norm, update


class Ours:
    """The draft of specforge_train without FSDP, its layers compiled once for all lengths."""

    def __init__(self, shapes: StepShapes, device: torch.device) -> None:
        self.method, self.device, self.shape = DSpark(), device, draft_shape(shapes)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with device:
            self.model = self.method.build(self.shape).to(self.dtype)
            embedding, head = (
                torch.randn(shapes.vocabulary, shapes.hidden, dtype=self.dtype).mul_(0.02) for _ in range(2)
            )
        for name, parameter in self.model.named_parameters():
            with torch.no_grad():
                parameter.normal_(std=0.02) if parameter.ndim >= 2 else parameter.fill_("norm" in name)
        self.frozen = FrozenTarget(embedding, head)
        self.parameters: Sequence[Tensor] = list(self.model.parameters())
        self.optimizer = build_adamw(self.model, OptimizerConfig())
        self.spec = CaptureSpec(
            method="dspark",
            layer_ids=shapes.captured,
            final_state=True,
            dtype="bfloat16",
            hidden_size=shapes.hidden,
            vocab_size=shapes.vocabulary,
            target_revision="random",
            tokenizer_hash="random",
        )
        self.weights = torch.ones((), device=device)
        if device.type == "cuda":
            keep_aten_gemms()
            for layer in self.model.layers:
                layer.compile(dynamic=True)

    def forward(self, sample: Sample) -> Tensor:
        """Host preparation included."""
        offsets = torch.tensor([0, sample.tokens.shape[0]])
        batch = FeatureBatch(
            sample.tokens,
            sample.loss_mask,
            offsets,
            sample.hidden,
            sample.last_hidden,
            ("0",),
            ((0, 0),),
            self.spec,
        )
        inputs = self.method.prepare(batch, self.shape, 0)
        self.weights.fill_(inputs.weight_sum)
        return self.model(inputs.to(self.device), sample.hidden, sample.last_hidden, self.frozen).loss

    def update(self) -> None:
        """The trainer's own: the clip factor rides in the fused step."""
        update(self.optimizer, 1e-4, 1.0, self.weights, squared_norm(self.model))


def draft_shape(shapes: StepShapes) -> DraftShape[DSparkConfig]:
    """The draft that the peers train too."""
    config = DSparkConfig(
        num_layers=shapes.draft_layers,
        block_size=shapes.block,
        num_anchors=shapes.anchors,
        markov={"rank": shapes.markov_rank},
        loss={"decay": shapes.decay},
    )
    return DraftShape(
        config=config,
        hidden_size=shapes.hidden,
        vocab_size=shapes.vocabulary,
        num_target_layers=shapes.target_layers,
        layer_ids=shapes.captured,
        mask_token_id=shapes.mask_token,
        intermediate_size=shapes.intermediate,
        num_heads=shapes.heads,
        num_kv_heads=shapes.key_heads,
        head_dim=shapes.head_dim,
        rope_theta=1e6,
        max_positions=40960,
        rms_norm_eps=1e-6,
    )


def print_profile(shapes: StepShapes, size: int, device: torch.device) -> None:
    """The device time of a step's kernels."""
    ours = Ours(shapes, device)
    sample = draw_sample(shapes, [size], device)
    for _ in range(3):
        time_step(ours, sample, device)
    with torch.profiler.profile() as profile:
        time_step(ours, sample, device)
    print(
        profile.key_averages().table(sort_by="self_device_time_total", row_limit=45, max_name_column_width=70)
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", default="", help="peers to time, separated by commas")
    parser.add_argument("--wheels", type=Path, help="folder with the peers' wheels, unpacked")
    parser.add_argument("--seed", type=int, default=7, help="of the lengths")
    parser.add_argument("--count", type=int, default=24, help="sequences of a pass")
    parser.add_argument(
        "--at", type=int, nargs="*", default=[256, 1024, 2048, 3911], help="single lengths to time"
    )
    parser.add_argument("--profile", type=int, help="only print the kernels of a step at this length")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script out")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = StepShapes()
    if arguments.tiny:
        shapes = dataclasses.replace(
            shapes, hidden=64, intermediate=128, vocabulary=500, heads=4, key_heads=2, head_dim=16,
            anchors=16, mask_token=499, markov_rank=8, draft_layers=2,
        )  # fmt: skip
    if arguments.profile:
        print_profile(shapes, arguments.profile, device)
        return
    peers = [name for name in arguments.against.split(",") if name]
    if peers and arguments.wheels is None:
        parser.error("--against needs --wheels")
    builds = {"ours": Ours} | {name: find_peer(name, arguments.wheels) for name in peers}
    lengths = draw_lengths(arguments.count, arguments.seed)
    reports = [
        measure_steps(name, build, shapes, lengths, arguments.at, device) for name, build in builds.items()
    ]
    print_reports(reports)


if __name__ == "__main__":
    main()
