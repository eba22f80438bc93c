"""Settings that the schema knows and this version does not carry out; a run that asks for one is refused."""

from specforge_config.run import RunConfig


def not_implemented(config: RunConfig) -> list[str]:
    """A line for each setting of `config` that nothing carries out yet; empty for a run that can start."""
    refused = []
    if config.draft.method != "dspark":
        refused.append(f"draft.method={config.draft.method} (built: dspark)")
    if (scaling := config.draft.rope_scaling) is not None:
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind not in ("default", "yarn"):
            refused.append(f"draft.rope_scaling with rope_type={kind} (built: default, yarn)")
    if config.deployment.mode == "offline":
        refused.append("deployment.mode=offline (built: local_colocated, disaggregated)")
    if config.tracking.trackers:
        refused.append(
            f"tracking.trackers={list(config.tracking.trackers)} (built: metrics.jsonl, always written)"
        )
    return [f"not implemented yet: {line}" for line in refused]
