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
    draft = shape.config
    sliding = draft.sliding_window is not None
    heads = {
        "markov_rank": draft.markov.rank,
        "markov_head_type": draft.markov.head,
        "enable_confidence_head": draft.confidence.enabled,
        "confidence_head_with_markov": draft.confidence.with_markov,
    }
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
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
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": draft.init_std,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * shape.num_layers,
        "max_position_embeddings": shape.max_positions,
        "max_window_layers": 0 if sliding else shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "num_target_layers": shape.num_target_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None if scaling_type(draft.rope_scaling) == "default" else draft.rope_scaling,
        "rope_theta": shape.rope_theta,
        "sample_from_anchor": True,
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


def served_shape(config: Mapping[str, Any]) -> DraftShape[DSparkConfig]:
    """The sizes of a draft served under `config`; fields may stand at the top level or in `dflash_config`.

    Raises:
        ValueError: naming missing fields, or for a slot convention or a mixture of windows that cannot be
            trained here.
    """
    fields = {**config, **(config.get("dflash_config") or {})}
    if missing := [name for name in _REQUIRED if fields.get(name) is None]:
        raise ValueError(f"config.json of a DSpark draft lacks {', '.join(missing)}")
    if not fields.get("sample_from_anchor", True):
        raise ValueError(
            "config.json says sample_from_anchor false, required true: slot 0 predicts the token after the "
            "anchor"
        )
    kinds = set(fields.get("layer_types") or ["full_attention"])
    if len(kinds) > 1:
        raise ValueError(f"not implemented yet: a DSpark draft that mixes {sorted(kinds)}")
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
        "sliding_window": fields.get("sliding_window") if kinds == {"sliding_attention"} else None,
        "markov": {"head": fields["markov_head_type"], "rank": fields["markov_rank"]},
        "confidence": confidence,
    })  # fmt: skip
    return resolve_shape(draft, target, fields["mask_token_id"])
