"""DSpark as a method: what the registry holds."""

from collections.abc import Mapping
from typing import Any, Literal

from specforge_config.draft import DSparkConfig
from specforge_config.features import FeatureBatch
from specforge_config.target import TargetShape
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel, DraftShape, StepInputs, Verifier, resolve_shape
from specforge_train.methods.dspark import served, speculators
from specforge_train.methods.dspark.drafter import DSparkDrafter
from specforge_train.methods.dspark.features import DSparkInputs, prepare
from specforge_train.methods.dspark.flops import step_flops
from specforge_train.methods.dspark.model import DSparkModel

Shape = DraftShape[DSparkConfig]


class DSpark:
    """The method of `draft.method: dspark`; see `Method` for what each part does."""

    name = "dspark"
    architecture = served.ARCHITECTURE

    def resolve(self, draft: DSparkConfig, target: TargetShape, mask_token_id: int) -> Shape:
        """See `Method.resolve`."""
        return resolve_shape(draft, target, mask_token_id)

    def build(self, shape: Shape) -> DSparkModel:
        """See `Method.build`."""
        return DSparkModel(shape)

    def prepare(
        self, batch: FeatureBatch, shape: Shape, seed: int, unsupervised: Literal["drop", "error"] = "drop"
    ) -> DSparkInputs:
        """See `Method.prepare`."""
        return prepare(batch, shape, seed, unsupervised)

    def flops(self, shape: Shape, inputs: StepInputs) -> float:
        """See `Method.flops`."""
        assert isinstance(inputs, DSparkInputs)
        return step_flops(shape, inputs)

    def drafter(self, model: DraftModel, frozen: FrozenTarget) -> DSparkDrafter:
        """See `Method.drafter`."""
        assert isinstance(model, DSparkModel)
        return DSparkDrafter(model, frozen)

    def served_config(self, shape: Shape, dtype: str) -> dict[str, Any]:
        """See `Method.served_config`."""
        return served.served_config(shape, dtype)

    def served_shape(self, config: Mapping[str, Any]) -> Shape:
        """See `Method.served_shape`."""
        if "speculators_model_type" in config:
            return speculators.speculators_shape(config)
        return served.served_shape(config)

    def served_faults(self, config: Mapping[str, Any]) -> list[str]:
        """See `Method.served_faults`."""
        return [] if "speculators_model_type" in config else served.served_faults(config)

    def speculators_config(self, shape: Shape, dtype: str, verifier: Verifier) -> dict[str, Any]:
        """See `Method.speculators_config`."""
        return speculators.speculators_config(shape, dtype, verifier)
