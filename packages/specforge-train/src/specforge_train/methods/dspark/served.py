"""The `config.json` of a served DSpark draft, both ways.

SGLang 0.5.18 reads the heads' fields (`markov_rank`, `markov_head_type`, `confidence_head_with_markov`) from
the top level and the layer ids and mask token from `dflash_config`; SpecForge reads all of them from
`dflash_config`. Both places are written. Layer ids are post-layer and 0-based, as in the run's configuration.
`sample_from_anchor` says that slot 0 predicts.
"""

from collections.abc import Mapping
from typing import Any

from specforge_config.draft import DSparkConfig
from specforge_config.target import TargetShape
from specforge_train.methods.base import DraftShape, resolve_shape
from specforge_train.methods.rotary import scaling_type

ARCHITECTURE = "DSparkDraftModel"


def served_config(shape: DraftShape[DSparkConfig], dtype: str) -> dict[str, Any]:
    """The configuration of a draft whose weights have type `dtype`."""
    draft, heads = shape.config, heads_config(shape)
    return {
        **backbone_config(shape),
        "architectures": [ARCHITECTURE],
        "block_size": draft.block_size,
        **heads,
        "dflash_config": {
            **heads,
            "attention_mode": "gqa" if shape.num_kv_heads < shape.num_heads else "mha",
            "block_size": draft.block_size,
            "mask_token_id": shape.mask_token_id,
            "projector_type": "dspark",
            "target_layer_ids": list(shape.layer_ids),
        },
        "dtype": dtype,
        "num_target_layers": shape.num_target_layers,
        "sample_from_anchor": True,
    }


def heads_config(shape: DraftShape[DSparkConfig]) -> dict[str, Any]:
    """The heads' fields."""
    markov, confidence = shape.config.markov, shape.config.confidence
    return {
        "markov_rank": markov.rank,
        "markov_head_type": markov.head,
        "enable_confidence_head": confidence.enabled,
        "confidence_head_with_markov": confidence.with_markov,
    }


def backbone_config(shape: DraftShape[DSparkConfig]) -> dict[str, Any]:
    """The backbone's fields, a Qwen3 configuration of transformers."""
    draft = shape.config
    sliding = draft.sliding_window is not None
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": draft.init_std,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * shape.num_layers,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": 0 if sliding else shape.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None if scaling_type(draft.rope_scaling) == "default" else draft.rope_scaling,
        "rope_theta": shape.rope_theta,
        "sliding_window": draft.sliding_window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": shape.vocab_size,
    }


_REQUIRED = (
    "block_size",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_target_layers",
    "rms_norm_eps",
    "target_layer_ids",
    "vocab_size",
)


_FIXED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "sample_from_anchor": True,
}
"""Fields that may be absent, else have the one value for which the draft is built."""

_SECTIONS = ("dflash_config", "dspark_config")


def served_shape(config: Mapping[str, Any]) -> DraftShape[DSparkConfig]:
    """The sizes of a draft served under `config`; fields may stand at the top level, in `dflash_config` or in
    `dspark_config`.

    Raises:
        ValueError: naming missing fields and those that stand there twice with different values, or for a
            convention or a mixture of windows that cannot be trained here.
    """
    fields = dict(config)
    for section in _SECTIONS:
        for name, value in (config.get(section) or {}).items():
            if name in fields and fields[name] != value:
                raise ValueError(
                    f"config.json says {name} {value!r} in {section} and {fields[name]!r} elsewhere, "
                    "required the same: engines differ in which they read"
                )
            fields[name] = value
    return shape_of_fields(fields, "a DSpark draft")


def served_faults(config: Mapping[str, Any]) -> list[str]:
    """What SGLang 0.5.18 would misread under `config`, which `served_shape` accepts."""
    faults = []
    for name in ("markov_rank", "markov_head_type", "confidence_head_with_markov"):
        if name not in config:
            faults.append(
                f"{name} is missing at the top level, required there: SGLang builds the heads by it"
            )
    causal, sliding = config.get("is_causal"), "sliding_attention" in (config.get("layer_types") or ())
    if causal is not None and causal != sliding:
        faults.append(
            f"is_causal is {causal}, required {sliding} or none: blocks were trained "
            + ("causally, in a window" if sliding else "to see all their slots")
        )
    if sliding and not config.get("use_sliding_window", False):
        faults.append("use_sliding_window is not true, required for sliding_attention in layer_types")
    return faults


def shape_of_fields(fields: Mapping[str, Any], what: str) -> DraftShape[DSparkConfig]:
    """The sizes of `what`, from fields under the names of `served_config`, all at one level.

    Raises:
        ValueError: as `served_shape`.
    """
    if missing := [name for name in _REQUIRED if fields.get(name) is None]:
        raise ValueError(f"config.json of {what} lacks {', '.join(missing)}")
    for name, value in _FIXED.items():
        if fields.get(name, value) != value:
            raise ValueError(f"config.json says {name} {fields[name]!r}, required {value!r}")
    window = _window(fields)
    rope = fields.get("rope_parameters") or {}
    theta = float(fields.get("rope_theta") or rope.get("rope_theta") or 10000.0)
    target = TargetShape(
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_target_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        vocab_size=fields["vocab_size"],
        max_positions=fields.get("max_position_embeddings", 32768),
        rms_norm_eps=fields["rms_norm_eps"],
        rope_theta=theta,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "float32"),
        tied_head=False,
    )
    confidence: dict[str, bool] = {"enabled": fields.get("enable_confidence_head", True)}
    if confidence["enabled"]:
        confidence["with_markov"] = fields.get("confidence_head_with_markov", True)
    draft = DSparkConfig.model_validate({
        "num_layers": fields["num_hidden_layers"],
        "target_layer_ids": fields["target_layer_ids"],
        "rope_scaling": fields.get("rope_scaling") or (rope if scaling_type(rope) != "default" else None),
        "init_std": fields.get("initializer_range", 0.02),
        "block_size": fields["block_size"],
        "sliding_window": window,
        "markov": {"head": fields["markov_head_type"], "rank": fields["markov_rank"]},
        "confidence": confidence,
    })  # fmt: skip
    return resolve_shape(draft, target, fields["mask_token_id"])


def _window(fields: Mapping[str, Any]) -> int | None:
    """The sliding window of all layers."""
    layer_types = fields.get("layer_types") or ["full_attention"] * fields["num_hidden_layers"]
    kinds = set(layer_types)
    if len(kinds) > 1:
        raise ValueError(f"not implemented yet: a DSpark draft that mixes {sorted(kinds)}")
    if len(layer_types) != fields["num_hidden_layers"]:
        raise ValueError(
            f"config.json lists {len(layer_types)} layer_types, required num_hidden_layers, "
            f"{fields['num_hidden_layers']}"
        )
    if kinds != {"sliding_attention"}:
        return None
    if fields.get("sliding_window") is None:
        raise ValueError("config.json lacks sliding_window, required for sliding_attention in layer_types")
    return fields["sliding_window"]
