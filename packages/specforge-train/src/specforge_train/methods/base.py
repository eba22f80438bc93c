"""What a draft method is to the rest of the system, and the sizes of a draft.

A method resolves the user's draft section against a target's shape, builds the model, prepares a batch on the
host, and says how the draft is served. The trainer knows this protocol only.

Notation: T packed tokens, H hidden, K captured layers, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from specforge_config.draft import Backbone, check_layer_ids, check_mask_token, default_layer_ids
from specforge_config.features import FeatureBatch
from specforge_config.target import TargetShape
from specforge_kernels.warm_up import WarmUp
from specforge_train.methods.rotary import check_scaling

if TYPE_CHECKING:
    from specforge_train.decode import Drafter
    from specforge_train.frozen import FrozenTarget

DraftT = TypeVar("DraftT", bound=Backbone)


@dataclass(frozen=True)
class DraftShape(Generic[DraftT]):
    """A draft's sizes, with the target's filled in for those that the user left out."""

    config: DraftT
    """The draft section; the source of all that is not a size."""
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    layer_ids: tuple[int, ...]
    """Captured target layers, post-layer and 0-based, in the order of the captured columns."""
    mask_token_id: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int
    rms_norm_eps: float

    @property
    def num_layers(self) -> int:
        """Decoder layers of the draft."""
        return self.config.num_layers


def resolve_shape(draft: DraftT, target: TargetShape, mask_token_id: int) -> DraftShape[DraftT]:
    """Fill a draft section in from the target's shape.

    Raises:
        ValueError: naming the setting, if sizes do not fit each other or the target, or a rotary scaling is
            unknown.
    """
    check_scaling(draft.rope_scaling)
    layer_ids = draft.target_layer_ids
    if layer_ids is None:
        layer_ids = default_layer_ids(target.num_layers)
    check_layer_ids(layer_ids, target.num_layers)
    check_mask_token(mask_token_id, target.vocab_size, (), None)
    num_heads = draft.num_heads or target.num_heads
    num_kv_heads = draft.num_kv_heads or target.num_kv_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"draft.num_kv_heads is {num_kv_heads}, required a divisor of draft.num_heads, {num_heads}"
        )
    return DraftShape(
        config=draft,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        layer_ids=tuple(layer_ids),
        mask_token_id=mask_token_id,
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draft.head_dim or target.head_dim,
        rope_theta=draft.rope_theta or target.rope_theta,
        max_positions=draft.max_positions or target.max_positions,
        rms_norm_eps=draft.rms_norm_eps or target.rms_norm_eps,
    )


@dataclass(frozen=True)
class Verifier:
    """The target, as an exported draft names it."""

    name: str
    """Its folder, or its name on a hub."""
    architectures: tuple[str, ...]
    """`architectures` of its `config.json`."""


@dataclass(frozen=True)
class StepInputs:
    """What a method derives from a batch's tokens alone, on the host, before the states are needed."""

    weight_sum: float
    """Sum of the loss weights: this micro-batch's part of the loss denominator."""
    dropped_ids: tuple[str, ...]
    """Samples that hold nothing to learn from."""

    @property
    def dropped(self) -> int:
        """Number of such samples."""
        return len(self.dropped_ids)

    def to(self, device: torch.device) -> StepInputs:
        """The same, with what the model reads on `device`; the host does not wait for the copy."""
        raise NotImplementedError


class StepTerms(NamedTuple):
    """Un-normalised results of one micro-step. A tuple, so that FSDP finds the loss in it."""

    loss: Tensor
    """[] differentiable numerator; the loss is its sum over the world and the accumulation, over the same sum
    of weights.
    """
    sums: dict[str, tuple[Tensor, Tensor]]
    """Metric -> (numerator [], denominator []), detached, on the device. Ratios are formed after both are
    summed.
    """


class DraftModel(nn.Module):
    """A draft; its parameters carry the names under which it is served."""

    layers: nn.ModuleList
    """Decoder layers: the units of sharding."""

    def __init__(self, shape: DraftShape[Any]) -> None:
        super().__init__()
        self.shape = shape

    def warm_up(self, device: torch.device, dtype: torch.dtype) -> WarmUp:
        """Start compiling the kernels of a training step, in threads; the first step waits for them.

        Args:
            device: where the model will compute, and
            dtype: in which type.
        """
        raise NotImplementedError

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill all parameters: matrices normal with `init_std`, norms 1, biases 0.

        Each matrix is drawn whole on the host from a generator seeded by `seed` and its name, so that the
        values depend neither on the sharding nor on the device, nor on what other parameters exist.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            value = torch.empty(parameter.shape).normal_(0.0, self.shape.config.init_std, generator=generator)
            if isinstance(parameter, DTensor):
                value = value.to(parameter.device)
                # Every rank drew the same values: none needs to be sent.
                value = distribute_tensor(
                    value, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(value)

    def forward(
        self, inputs: Any, hidden: Tensor, last_hidden: Tensor | None, frozen: FrozenTarget
    ) -> StepTerms:
        """Loss terms of a micro-batch.

        Args:
            inputs: what the method's `prepare` gave, on the model's device.
            hidden: [T, K·H] captured states, any float type.
            last_hidden: [T, H] final post-norm states, None if the method needs none.
            frozen: the target's embedding and head, in the type of computation.
        """
        raise NotImplementedError


class Method(Protocol):
    """A draft method."""

    name: str
    """Its name in `draft.method`."""
    architecture: str
    """Its name in a served configuration's `architectures`."""

    def resolve(self, draft: Any, target: TargetShape, mask_token_id: int) -> DraftShape[Any]:
        """The draft's sizes. Raises ValueError naming the setting that does not fit."""
        ...

    def build(self, shape: DraftShape[Any]) -> DraftModel:
        """The model on the current default device, `meta` too; `init_weights` or a loaded state fills it."""
        ...

    def prepare(
        self,
        batch: FeatureBatch,
        shape: DraftShape[Any],
        seed: int,
        unsupervised: Literal["drop", "error"] = "drop",
    ) -> StepInputs:
        """Derive a step's inputs from the batch's host tensors.

        What is drawn at random for a sample depends on (`seed`, epoch, position) only: not on ranks or batch
        sizes.

        Raises:
            ValueError: naming the samples without supervision, if `unsupervised` is "error".
        """
        ...

    def flops(self, shape: DraftShape[Any], inputs: StepInputs) -> float:
        """Operations of a micro-step's forward and backward, from the host's inputs."""
        ...

    def drafter(self, model: DraftModel, frozen: FrozenTarget) -> Drafter:
        """The inference side of a whole (not sharded) model."""
        ...

    def served_config(self, shape: DraftShape[Any], dtype: str) -> dict[str, Any]:
        """The `config.json` under which the draft is served."""
        ...

    def served_shape(self, config: Mapping[str, Any]) -> DraftShape[Any]:
        """The sizes of a draft under `config`, SGLang's or that of speculators. Raises ValueError naming
        missing fields and those that contradict each other.
        """
        ...

    def served_faults(self, config: Mapping[str, Any]) -> list[str]:
        """What an engine would misread under `config`, which `served_shape` accepts: a line a field."""
        ...

    def speculators_config(self, shape: DraftShape[Any], dtype: str, verifier: Verifier) -> dict[str, Any]:
        """The `config.json` under which speculators loads the draft. Raises ValueError for a draft that it
        would compute differently.
        """
        ...
