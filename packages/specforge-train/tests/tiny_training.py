"""A tiny DSpark run for tests: random frozen target, features that depend on a sample's place in the plan
only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.optim import OptimizerConfig
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape
from specforge_train.checkpoint import Checkpoints
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel
from specforge_train.parallel import World, set_full, shard, start_world
from specforge_train.registry import get_method
from specforge_train.trainer import Trainer

TARGET = TargetShape(
    hidden_size=16,
    intermediate_size=32,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=40,
    max_positions=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    dtype="float32",
    tied_head=False,
)
MASK = 39
SPEC = CaptureSpec(
    method="dspark",
    layer_ids=(0, 2),
    final_state=True,
    dtype="float32",
    hidden_size=TARGET.hidden_size,
    vocab_size=TARGET.vocab_size,
    target_revision="tiny",
    tokenizer_hash="tiny",
)


class Layered(DraftModel):
    """The least that can be sharded; its odd sizes make shards uneven and leave some ranks without any."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
        self.norm = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        """[] a sum over rows of x [n, 5]."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x).square().sum()


MICRO_STEPS, CLIP, WEIGHTS = 2, 0.5, 12.0
"""Of a step of `Layered` over `inputs`; its sum of weights is as good as any other."""
ADAM = OptimizerConfig(lr=1e-2, weight_decay=0.0)


def inputs(step: int, rank: int, micro: int) -> Tensor:
    """[4, 5] what a rank feeds to `Layered` in a micro-step."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))


def layered_weights(seed: int) -> dict[str, Tensor]:
    """Those that `Layered()` has after `torch.manual_seed(seed)`."""
    torch.manual_seed(seed)
    return Layered().state_dict()


def sharded_layered(
    world: World, seed: int, share: Callable[..., DraftModel] = shard, dtype: torch.dtype = torch.float32
) -> Layered:
    """A model with `layered_weights`, sharded by `share`, that computes in `dtype`."""
    values = layered_weights(seed)
    with torch.device("meta"):
        model = Layered()
    share(model, world, dtype).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        set_full(parameter, values[name])
    return model


def tiny_config(folder: Path, world_size: int = 1, **sections: dict[str, Any]) -> RunConfig:
    """A run in `folder`; `sections` are merged into its own."""
    base: dict[str, Any] = {
        "output_dir": str(folder),
        "target": {"path": "target"},
        "data": {"train": "train.jsonl"},
        "draft": {
            "num_layers": 2,
            "target_layer_ids": SPEC.layer_ids,
            "block_size": 3,
            "num_anchors": 4,
            "mask_token_id": MASK,
            "markov": {"rank": 4},
        },
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
        "schedule": {"warmup_steps": 2},
        "training": {"batch_size": 2, "save_every": 0, "log_every": 1},
        "deployment": {
            "trainer": {
                "nproc_per_node": world_size,
                "device": "cpu",
                "cpu_threads": 1,
                "timeout_seconds": 30,
            }
        },
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return RunConfig(**base)


def sample(epoch: int, position: int, supervised: bool = True) -> FeatureBatch:
    """The features of one sample of 9 to 14 tokens."""
    generator = torch.Generator().manual_seed(1000 * epoch + position)
    length = 9 + position % 6
    mask = torch.zeros(length, dtype=torch.bool)
    mask[2:] = supervised
    return FeatureBatch(
        tokens=torch.randint(0, MASK, (length,), generator=generator),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, length]),
        hidden=torch.randn(length, len(SPEC.layer_ids) * SPEC.hidden_size, generator=generator),
        last_hidden=torch.randn(length, SPEC.hidden_size, generator=generator),
        sample_ids=(f"sample-{position}",),
        positions=((epoch, position),),
        spec=SPEC,
    )


def pack(parts: list[FeatureBatch]) -> FeatureBatch:
    """One batch of several."""
    lengths = torch.tensor([0, *(part.tokens.shape[0] for part in parts)])
    return replace(
        parts[0],
        tokens=torch.cat([part.tokens for part in parts]),
        loss_mask=torch.cat([part.loss_mask for part in parts]),
        cu_seqlens=lengths.cumsum(0),
        hidden=torch.cat([part.hidden for part in parts]),
        last_hidden=torch.cat([part.last_hidden for part in parts if part.last_hidden is not None]),
        sample_ids=tuple(name for part in parts for name in part.sample_ids),
        positions=tuple(position for part in parts for position in part.positions),
    )


@dataclass(frozen=True)
class TinyStats:
    """What `stats` gives."""

    capture_seconds: float
    tokens: int
    staged_bytes: int


class TinyStream:
    """Features of one rank in the plan's order, 12 samples an epoch.

    `change(step, rank, batch)` may alter a batch, raise, or end the stream with None.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        start_step: int,
        change: Callable[[int, int, FeatureBatch], FeatureBatch | None] | None = None,
    ) -> None:
        self.acknowledged: list[int] = []
        self._batches, self._tokens = self._plan(config, rank, start_step, change), 0

    def _plan(self, config: RunConfig, rank: int, step: int, change: Any) -> Iterator[FeatureBatch]:
        plan, steps_per_epoch = config.batches, 12 // config.batches.global_batch_size
        while True:
            epoch, window = divmod(step, steps_per_epoch)
            step += 1
            for micro in range(plan.accumulation):
                first = window * plan.global_batch_size + micro * plan.micro_batch + rank * plan.batch_size
                batch = pack([sample(epoch, first + i) for i in range(plan.batch_size)])
                batch = change(step, rank, batch) if change else batch
                if batch is None:
                    return
                self._tokens += batch.tokens.shape[0]
                yield batch

    def __next__(self) -> FeatureBatch:
        return next(self._batches)

    def acknowledge(self, step: int) -> None:
        """Note a step whose features are let go."""
        self.acknowledged.append(step)

    def stats(self) -> TinyStats:
        """Sums since the last call."""
        tokens, self._tokens = self._tokens, 0
        return TinyStats(0.0, tokens, 1)


def frozen_target() -> FrozenTarget:
    """Random embedding and head."""
    generator = torch.Generator().manual_seed(7)
    shape = (TARGET.vocab_size, TARGET.hidden_size)
    embedding, head = (torch.randn(shape, generator=generator) for _ in range(2))
    return FrozenTarget(embedding, head, dummy=True)


def tiny_trainer(
    config: RunConfig,
    total_steps: int,
    *,
    world: World | None = None,
    plan: dict[str, Any] | None = None,
    **parts: Any,
) -> Trainer:
    """A trainer of this process's rank; `parts` are the stream's `change` and the trainer's own."""
    world = world or start_world(config.deployment.trainer, config.topology, config.training.sharding)
    training = config.training
    checkpoints = Checkpoints(
        Path(config.folder),
        world,
        plan or {"seed": config.seed, "batch_size": training.batch_size},
        SPEC,
        keep=training.keep_checkpoints,
        resume=training.resume,
    )
    method = get_method("dspark")
    shape = method.resolve(config.draft, TARGET, MASK)
    stream = TinyStream(config, world.rank, checkpoints.step, parts.pop("change", None))
    return Trainer(config, method, shape, frozen_target(), stream, world, checkpoints, total_steps, **parts)
