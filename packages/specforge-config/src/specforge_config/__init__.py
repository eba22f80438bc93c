"""Run configuration, topology and feature contracts of draft-model training. Imports no torch.

The names are loaded on first use, so that a command line that only prints its help does not pay for building
the models.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specforge_config.draft import DSparkConfig
    from specforge_config.features import CaptureSpec, FeatureBatch
    from specforge_config.loading import ConfigError, load_run
    from specforge_config.run import RunConfig
    from specforge_config.topology import BatchPlan, Topology, resolve_batches

__all__ = [
    "BatchPlan",
    "CaptureSpec",
    "ConfigError",
    "DSparkConfig",
    "FeatureBatch",
    "RunConfig",
    "Topology",
    "load_run",
    "resolve_batches",
]

_HOMES = {
    "draft": ("DSparkConfig",),
    "features": ("CaptureSpec", "FeatureBatch"),
    "loading": ("ConfigError", "load_run"),
    "run": ("RunConfig",),
    "topology": ("BatchPlan", "Topology", "resolve_batches"),
}


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
