"""Our DSpark steps for `specforge-kernels bench`, which finds them as entry points.

Both are the trainer's own model, inputs, loss and update. `DSparkStep` keeps weights, gradients and moments
in bf16 and shards nothing, as the trainers it is compared with do. `TrainerStep` is a rank of a real run in a
world of one: float32 master weights, gradients and moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specforge_config.deployment import TrainerNodes
from specforge_config.draft import DSparkConfig
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.optim import OptimizerConfig
from specforge_config.topology import Topology
from specforge_kernels.bench.steps import Sample, StepShapes
from specforge_kernels.inductor import keep_compiled
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel, DraftShape
from specforge_train.methods.dspark.method import DSpark
from specforge_train.optim import build_adamw, squared_norm, update
from specforge_train.parallel import shard, start_world


class DSparkStep:
    """Weights, gradients and moments in bf16 (float32 on a CPU)."""

    packs = True

    def __init__(self, shapes: StepShapes, device: torch.device) -> None:
        keep_compiled()
        self.device, self.shapes = device, shapes
        self.method, self.shape = DSpark(), draft_shape(shapes)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = self.build()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.normal_(std=0.02) if parameter.ndim >= 2 else parameter.fill_("norm" in name)
        size = (shapes.vocabulary, shapes.hidden)
        embedding, head = (torch.empty(size, dtype=self.dtype, device=device).normal_(std=0.02) for _ in "eh")
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

    def build(self) -> DraftModel:
        """The model, its weights undefined."""
        with self.device:
            return self.method.build(self.shape).to(self.dtype)

    def forward(self, sample: Sample) -> Tensor:
        """The loss, the host's preparation included, and in the first step all compilation."""
        count = sample.offsets.numel() - 1
        batch = FeatureBatch(
            sample.tokens,
            sample.loss_mask,
            sample.offsets,
            sample.hidden,
            sample.last_hidden,
            tuple(str(i) for i in range(count)),
            tuple((0, i) for i in range(count)),
            self.spec,
        )
        inputs = self.method.prepare(batch, self.shape, 0)
        self.weights.fill_(inputs.weight_sum)
        return self.model(inputs.to(self.device), sample.hidden, sample.last_hidden, self.frozen).loss

    def update(self) -> None:
        """The trainer's own: the clip factor rides in the fused step."""
        update(self.optimizer, 1e-4, 1.0, self.weights, squared_norm(self.model))

    def close(self) -> None:
        """Nothing is held."""


class TrainerStep(DSparkStep):
    """float32 master weights, gradients and moments in a world of this process."""

    def build(self) -> DraftModel:
        """The model with its masters, weights undefined."""
        self.world = start_world(
            TrainerNodes(device="cuda" if self.device.type == "cuda" else "cpu"), Topology(1), "grad_op"
        )
        with torch.device("meta"):
            model = self.method.build(self.shape)
        return shard(model, self.world, self.dtype).to_empty(device=self.device)

    def close(self) -> None:
        """End the world."""
        self.world.close()


STEPS = {"dspark": DSparkStep, "trainer": TrainerStep}
"""As the entry points of `specforge_kernels.steps` declare them."""


def draft_shape(shapes: StepShapes) -> DraftShape[DSparkConfig]:
    """The draft that every contender trains."""
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
