"""The `config.json` of a DSpark draft for speculators 0.9 (and what reads its format), both ways.

Tensors have the same names there. What differs:

- Layer ids count the states that transformers lists in `hidden_states`, whose first is the embedding: id k
  here is k + 1 there.
- The backbone's fields form a Qwen3 configuration of its own, `transformer_layer_config`.
- Its sliding window is another: all slots of a block see the w positions before the anchor, where slot k here
  sees w - 1 before its own. Such a draft is refused.

`num_target_layers` is this project's own field, which speculators keeps and does not read.
"""

from collections.abc import Mapping
from typing import Any

from specforge_config.draft import DSparkConfig
from specforge_train.methods.base import DraftShape, Verifier
from specforge_train.methods.dspark.served import backbone_config, heads_config, shape_of_fields

VERSION = "0.9.0"
NAME = "dspark"


def speculators_config(shape: DraftShape[DSparkConfig], dtype: str, verifier: Verifier) -> dict[str, Any]:
    """The configuration of a draft whose weights have type `dtype`.

    Raises:
        ValueError: for a draft with a sliding window.
    """
    block = shape.config.block_size
    if shape.config.sliding_window is not None:
        raise ValueError(
            f"draft.sliding_window is {shape.config.sliding_window}, required none for speculators, whose "
            "window is the same for all slots of a block: export the draft for SGLang"
        )
    return {
        "architectures": ["DSparkSpeculator"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layer_ids],
        "block_size": block,
        "draft_vocab_size": shape.vocab_size,
        "dtype": dtype,
        **heads_config(shape),
        "mask_token_id": shape.mask_token_id,
        "num_target_layers": shape.num_target_layers,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": NAME,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block}],
            "verifier": {"architectures": list(verifier.architectures), "name_or_path": verifier.name},
        },
        "speculators_model_type": NAME,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": backbone_config(shape),
    }


def speculators_shape(config: Mapping[str, Any]) -> DraftShape[DSparkConfig]:
    """The sizes of a draft under a configuration of speculators.

    Raises:
        ValueError: naming missing fields, or for a vocabulary, slot convention or window that cannot be
            trained here.
    """
    fields = {**(config.get("transformer_layer_config") or {}), **config}
    if layers := fields.get("aux_hidden_state_layer_ids"):
        fields["target_layer_ids"] = [layer - 1 for layer in layers]
    shape = shape_of_fields(fields, "a DSpark draft of speculators")
    if fields.get("draft_vocab_size", shape.vocab_size) != shape.vocab_size:
        raise ValueError(
            f"not implemented yet: a DSpark draft of {fields['draft_vocab_size']} tokens, required all "
            f"{shape.vocab_size} of the target"
        )
    if shape.config.sliding_window is not None:
        raise ValueError("not implemented yet: the sliding window of speculators")
    return shape
