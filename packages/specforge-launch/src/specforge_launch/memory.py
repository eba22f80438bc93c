"""The predicted peak of memory a rank, by part: arithmetic over shapes, without torch or a weight.

A draft with P parameters over S shards (float32 master weights, gradients and two Adam moments): 16 P / S
bytes stay on a rank, beside a copy in the computation's type. With S = 1 that copy is whole, and none is
needed where float32 computes; otherwise FSDP2 gathers it, whole with `grad_op` and two layers at a time with
`full` and `hybrid`.

Notation: T tokens of a micro-step on a rank, M drafted slots, H hidden, V vocabulary, K captured layers.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from specforge_capture.refs import ELEMENT_BYTES
from specforge_capture.sglang.engine_args import resolve_engine_arguments
from specforge_config.deployment import Disaggregated
from specforge_config.draft import BlockDraft, DSparkConfig, default_layer_ids
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape

_LOWER = {
    "engine's token pool": ("engine.max_total_tokens",),
    "draft master weights": ("draft.num_layers",),
    "draft gradients": ("draft.num_layers",),
    "optimizer states": ("draft.num_layers",),
    "draft working weights": ("draft.num_layers",),
    "an island's states, while it captures": ("data.max_length", "training.batch_size"),
    "target activations": ("data.max_length", "training.batch_size"),
    "features of staged batches": ("data.max_length", "training.batch_size"),
    "draft activations": ("data.max_length", "training.batch_size", "draft.num_anchors"),
    "draft and teacher logits": ("draft.num_anchors", "training.batch_size"),
}
"""Settings that a part shrinks with."""
_RAISE = {
    "target weights": ("engine.tp_size",),
    "draft master weights": ("deployment.trainer.nproc_per_node",),
    "draft gradients": ("deployment.trainer.nproc_per_node",),
    "optimizer states": ("deployment.trainer.nproc_per_node",),
}
"""Settings that spread a part over more ranks."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at its peak."""

    parts: dict[str, int]
    """Bytes of each part."""
    capacity: int | None
    """Bytes that the device has for this rank; None where unknown."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        """Whether the device has room for it; None where that is unknown."""
        return None if self.capacity is None else self.total <= self.capacity

    @property
    def too_large(self) -> tuple[str, ...]:
        """The largest parts, as many as together make more than what is missing; none where all fits."""
        missing, names = self.total - (self.capacity or self.total), []
        for name, size in sorted(self.parts.items(), key=lambda part: -part[1]):
            if missing > 0:
                names.append(name)
                missing -= size
        return tuple(names)

    @property
    def to_lower(self) -> tuple[str, ...]:
        """Settings to lower, where it does not fit."""
        return tuple(dict.fromkeys(key for name in self.too_large for key in _LOWER.get(name, ())))

    @property
    def to_raise(self) -> tuple[str, ...]:
        """Settings to raise, where it does not fit."""
        return tuple(dict.fromkeys(key for name in self.too_large for key in _RAISE.get(name, ())))

    def to_json(self) -> dict[str, object]:
        """The plan with its total, in bytes, and what to change where it does not fit."""
        sizes = {"parts": self.parts, "total": self.total, "capacity": self.capacity}
        return {**sizes, "fits": self.fits, "to_lower": self.to_lower, "to_raise": self.to_raise}


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a block draft with the target's filled in where the configuration leaves them out."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    captured: int
    vocabulary: int

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer: attention with q/k norms, SwiGLU, two norms."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def backbone_parameters(self) -> int:
        """Parameters of the projection, its norm, the layers and the final norm."""
        return self.captured * self.hidden**2 + 2 * self.hidden + self.layers * self.layer_parameters


def draft_sizes(draft: BlockDraft, target: TargetShape) -> DraftSizes:
    """Sizes of `draft` for `target`."""
    ids = draft.target_layer_ids
    return DraftSizes(
        hidden=target.hidden_size,
        intermediate=draft.intermediate_size or target.intermediate_size,
        heads=draft.num_heads or target.num_heads,
        kv_heads=draft.num_kv_heads or target.num_kv_heads,
        head_dim=draft.head_dim or target.head_dim,
        layers=draft.num_layers,
        captured=len(ids if ids is not None else default_layer_ids(target.num_layers)),
        vocabulary=target.vocab_size,
    )


def draft_parameters(draft: BlockDraft, target: TargetShape) -> int:
    """Number of trained parameters of a draft."""
    sizes = draft_sizes(draft, target)
    if not isinstance(draft, DSparkConfig):
        return sizes.backbone_parameters
    hidden, rank = sizes.hidden, draft.markov.rank
    joint = {"vanilla": 0, "gated": (hidden + rank + 1) * rank, "rnn": (hidden + 2 * rank + 1) * 3 * rank}[
        draft.markov.head
    ]
    width = hidden + (rank if draft.confidence.with_markov else 0)
    confidence = width + 1 if draft.confidence.enabled else 0
    return sizes.backbone_parameters + 2 * sizes.vocabulary * rank + joint + confidence


def element_bytes(config: RunConfig, target: TargetShape) -> int:
    """Bytes of an element of the target's weights and captured states."""
    return ELEMENT_BYTES[config.target.element_type(target)]


def target_bytes(config: RunConfig, target: TargetShape) -> int:
    """Bytes of the whole target: its weight files, or what their index adds up to, scaled to `target.dtype`;
    without either, a dense decoder of its shape."""
    width = element_bytes(config, target)
    folder = Path(config.target.path)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if not stored and index.is_file():
        stored = json.loads(index.read_text()).get("metadata", {}).get("total_size", 0)
    if stored and not config.dummy_weights:
        return stored * width // ELEMENT_BYTES.get(target.dtype, width)
    return target.parameters() * width


def _pool_bytes(config: RunConfig, target: TargetShape, island: int, *, on_gpu: bool) -> int:
    """Keys and values of the engine's pool: heads are spread over an island, a latent lies on each rank."""
    if config.target.backend != "sglang":
        return 0
    values = resolve_engine_arguments(config, target, "cuda" if on_gpu else "cpu").values
    heads = -(-target.num_kv_heads // island)
    channels = target.latent_kv or 2 * heads * target.head_dim
    width = element_bytes(config, target)
    return int(values["max_total_tokens"]) * target.num_layers * channels * width


def _target_parts(
    config: RunConfig, target: TargetShape, island: int, tokens: int, states: int, *, on_gpu: bool
) -> dict[str, int]:
    """Bytes of the target and its capture on a rank.

    Args:
        config: the run.
        target: the target's shape.
        island: ranks that the target is spread over.
        tokens: tokens that the island captures at a time.
        states: bytes of a token's captured states.
        on_gpu: whether ranks compute on GPUs.
    """
    width = element_bytes(config, target)
    return {
        "target weights": target_bytes(config, target) // island,
        "engine's token pool": _pool_bytes(config, target, island, on_gpu=on_gpu),
        "an island's states, while it captures": tokens * states if island > 1 else 0,
        "target activations": tokens
        * (6 * target.hidden_size + 3 * target.intermediate_size // island)
        * width,
    }


def predict(config: RunConfig, target: TargetShape, *, on_gpu: bool, capacity: int | None) -> MemoryPlan:
    """The peak of one rank.

    Args:
        config: the run.
        target: the target's shape.
        on_gpu: whether ranks compute on GPUs.
        capacity: bytes that a rank's device has.
    """
    draft = config.draft
    if not isinstance(draft, BlockDraft):
        raise ValueError(f"not implemented yet: the memory of draft.method {draft.method}")
    sizes, parameters = draft_sizes(draft, target), draft_parameters(draft, target)
    state = element_bytes(config, target)
    compute = {"auto": 2 if on_gpu else 4, "float32": 4, "bfloat16": 2}[config.training.dtype]
    shards = config.topology.mesh_shape(config.training.sharding)[1]
    gathered = 0
    if shards > 1:
        gathered = parameters if config.training.sharding == "grad_op" else 2 * sizes.layer_parameters
    elif compute != 4:
        gathered = parameters
    samples = config.batches.batch_size
    tokens, slots = samples * config.data.max_length, samples * draft.num_anchors * draft.block_size
    states = (sizes.captured + 1) * sizes.hidden * state
    staged = 1
    if isinstance(config.deployment, Disaggregated):
        staged += config.deployment.consumer.ahead_batches
    width = sizes.head_dim * (sizes.heads + 2 * sizes.kv_heads)
    context = sizes.hidden + sizes.layers * 2 * sizes.kv_heads * sizes.head_dim
    block = sizes.layers * (6 * sizes.hidden + 2 * width + 4 * sizes.intermediate)
    vocabulary = (1 if target.tied_head else 2) * target.vocab_size * target.hidden_size
    colocated, island = config.deployment.mode == "local_colocated", config.topology.tp_size
    parts = {
        **(
            _target_parts(config, target, island, island * tokens, states, on_gpu=on_gpu) if colocated else {}
        ),
        "frozen embedding and head": vocabulary * compute,
        "draft master weights": 4 * parameters // shards,
        "draft gradients": 4 * parameters // shards,
        "optimizer states": 8 * parameters // shards,
        "draft working weights": gathered * compute,
        "features of staged batches": staged * tokens * states,
        "draft activations": (tokens * context + slots * block) * compute,
        "draft and teacher logits": slots * sizes.vocabulary * 4 * (1 if on_gpu else 3),
    }
    return MemoryPlan(parts, capacity)


def predict_server(
    config: RunConfig, target: TargetShape, states: int, *, on_gpu: bool, capacity: int | None
) -> MemoryPlan:
    """The peak of one rank of a disaggregated run's capture server, which captures one sample at a time.

    Args:
        config: the run.
        target: the target's shape.
        states: bytes of a token's captured states.
        on_gpu: whether servers compute on GPUs.
        capacity: bytes that each of its ranks has.
    """
    island, tokens = config.engine.tp_size, config.data.max_length
    return MemoryPlan(_target_parts(config, target, island, tokens, states, on_gpu=on_gpu), capacity)


def require_room_to_measure(config: RunConfig, target: TargetShape, memory: MemoryPlan) -> None:
    """Check that ranks which hold no target while they train can load it, before and after, to decode.

    Raises:
        ValueError: if evaluation prompts are set and the target does not fit beside the draft.
    """
    if not config.evaluation.prompts or memory.capacity is None:
        return
    kept = ("frozen embedding and head", "draft master weights", "draft gradients", "optimizer states")
    need = target_bytes(config, target) + sum(memory.parts[name] for name in kept)
    if need > memory.capacity:
        raise ValueError(
            f"evaluation.prompts is set, but a trainer rank has {memory.capacity} bytes, and decoding takes "
            f"{need} with the whole target; required: evaluation.prompts [], and afterwards "
            "`specforge-launch evaluate` of the run's folder where the target fits"
        )
