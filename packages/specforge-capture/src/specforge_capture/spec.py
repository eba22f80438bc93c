"""Resolving the capture contract of a run."""

from specforge_config.draft import default_layer_ids
from specforge_config.features import CaptureSpec
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, target_revision


def resolve_capture_spec(config: RunConfig, shape: TargetShape, tokenizer_hash: str) -> CaptureSpec:
    """The contract under which a run's features are captured.

    Args:
        config: the run.
        shape: the target's shape, as `read_target_shape(config.target.path)` reads it.
        tokenizer_hash: `ChatRenderer.hash`.

    Raises:
        ValueError: if a layer does not exist, or the checkpoint's element type cannot be
            captured.
    """
    layers = config.draft.target_layer_ids or default_layer_ids(shape.num_layers)
    if wrong := [layer for layer in layers if not 0 <= layer < shape.num_layers]:
        raise ValueError(
            f"draft.target_layer_ids: {wrong} are no layers of a target with {shape.num_layers}; ids are "
            f"post-layer, from 0 to {shape.num_layers - 1}"
        )
    return CaptureSpec(
        method=config.draft.method,
        layer_ids=layers,
        # DFlash learns from data tokens alone; the others learn from the target's distribution.
        final_state=config.draft.method != "dflash",
        dtype=config.target.element_type(shape),
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        target_revision=config.target.revision or target_revision(config.target.path),
        tokenizer_hash=tokenizer_hash,
    )
