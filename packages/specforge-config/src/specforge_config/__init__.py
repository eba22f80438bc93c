"""Run configuration, topology and feature contracts of draft-model training. Imports no torch."""

from specforge_config.draft import DSparkConfig
from specforge_config.features import CaptureSpec, FeatureBatch
from specforge_config.run import RunConfig
from specforge_config.topology import BatchPlan, Topology, resolve_batches

__all__ = ["BatchPlan", "CaptureSpec", "DSparkConfig", "FeatureBatch", "RunConfig", "Topology", "resolve_batches"]
