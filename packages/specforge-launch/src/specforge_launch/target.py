"""The run's target through transformers, for the ranks that capture with it and for evaluations."""

import torch

from specforge_capture.targets.hf import HFTarget
from specforge_launch.resolve import Resolved
from specforge_train.replay import recorded


def transformers_target(resolved: Resolved, device: torch.device) -> HFTarget:
    """Load it on `device`; on a GPU its decoding steps are recorded and replayed."""
    config = resolved.config
    return HFTarget(
        config.target.path,
        resolved.spec,
        device,
        resolved.special.stop,
        dummy_seed=config.seed if config.dummy_weights else None,
        record=recorded if device.type == "cuda" else None,
    )
