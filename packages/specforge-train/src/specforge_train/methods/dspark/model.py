"""The DSpark draft (arXiv 2607.05147): the block backbone with a Markov and a confidence head.

A block's inputs are the anchor's token and G-1 mask tokens, at positions p … p+G-1; slot k predicts token
p+1+k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_config.draft import DSparkConfig
from specforge_kernels.policy import choose_objective
from specforge_kernels.warm_up import Launches
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.backbone import BlockBackbone, Geometry
from specforge_train.methods.base import DraftShape, StepTerms
from specforge_train.methods.dspark.features import DSparkInputs
from specforge_train.methods.dspark.heads import MARKOV_HEADS, ConfidenceHead
from specforge_train.methods.dspark.objective import step_terms


class DSparkModel(BlockBackbone):
    """The trained parameters; embedding and head are the target's."""

    def __init__(self, shape: DraftShape[DSparkConfig]) -> None:
        super().__init__(shape)
        markov, confidence = shape.config.markov, shape.config.confidence
        self.markov_head = MARKOV_HEADS[markov.head](shape.vocab_size, markov.rank, shape.hidden_size)
        self.confidence_head = (
            ConfidenceHead(shape.hidden_size, markov.rank if confidence.with_markov else 0)
            if confidence.enabled
            else None
        )

    def states(self, inputs: DSparkInputs, hidden: Tensor, embedding: Tensor) -> Tensor:
        """[M, H] states of all slots after the final norm, from captured states [T, K·H] and the embedding
        [V, H].
        """
        if inputs.layout is None or inputs.counts.dtype != torch.float32:
            raise ValueError(
                "inputs must come from prepare(...).to(device), unchanged: under FSDP set "
                "MixedPrecisionPolicy(cast_forward_inputs=False), the model casts the captured states itself"
            )
        geometry = Geometry(
            inputs.layout, self.rotary(inputs.context_positions), self.rotary(inputs.block_positions)
        )
        context = self.project(hidden)
        x = self.embed(inputs.ids, embedding)
        for layer in self.layers:
            x = layer(x, context, geometry)
        return self.finish(x)

    def forward(
        self, inputs: DSparkInputs, hidden: Tensor, last_hidden: Tensor | None, frozen: FrozenTarget
    ) -> StepTerms:
        """Loss terms of a micro-batch; see `DraftModel.forward`."""
        if last_hidden is None:
            raise ValueError("DSpark learns from the target's final states: capture with final_state true")
        self.warm_up(hidden.device, self.fc.weight.dtype).wait()
        states = self.states(inputs, hidden, frozen.embedding)
        embedding = self.markov_head.markov_w1(inputs.previous).view(-1, inputs.block, self.markov_head.rank)
        blocks = states.view(-1, inputs.block, states.shape[-1])
        features = self.markov_head(embedding, blocks).flatten(0, 1)
        confidence = (
            None if self.confidence_head is None else self.confidence_head(blocks, embedding).flatten()
        )
        w2 = self.markov_head.markov_w2.weight
        loss = self.shape.config.loss
        return step_terms(states, features, confidence, w2, last_hidden, frozen, inputs, loss)

    def launches(self, device: torch.device, dtype: torch.dtype) -> Launches:
        """Launches of all of the method's Triton kernels."""
        found = [*super().launches(device, dtype)]
        if choose_objective(device, dtype).name == "triton":
            from specforge_kernels.dspark_objective.triton import warm_up_objective

            found += warm_up_objective(self.shape.vocab_size, self.confidence_head is not None, dtype, device)
        return found
