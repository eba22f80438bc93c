"""DSpark at inference: one backbone pass a block, its slots chained through the Markov head.

Keys and values of the context are kept a layer; only the states of newly accepted tokens are projected.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from specforge_kernels.anchored_attention.api import build_layout
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.backbone import Layer
from specforge_train.methods.dspark.model import DSparkModel
from specforge_train.verification import Proposal


class DSparkDrafter:
    """Proposes blocks for one sequence at a time; `model` is whole, not sharded."""

    def __init__(self, model: DSparkModel, frozen: FrozenTarget) -> None:
        self.model, self.frozen = model, frozen
        self.block_size = model.shape.config.block_size
        self.begin()

    def begin(self) -> None:
        """Forget the context."""
        shape, weight = self.model.shape, self.model.fc.weight
        empty = weight.new_zeros(1, shape.num_kv_heads, shape.head_dim)
        # A layout counts the anchor's own row, which no slot sees: each cache ends with a blank row for it.
        self._blank = empty
        self._cache = [(empty, empty) for _ in self.model.layers]

    @property
    def context_length(self) -> int:
        """Tokens whose states are cached."""
        return self._cache[0][0].shape[0] - 1

    @torch.no_grad()
    def propose(
        self,
        new_hidden: Tensor,
        position: int,
        anchor: int,
        choose: Callable[[Tensor], Tensor] = torch.argmax,
    ) -> Proposal:
        """Draft the tokens after the anchor.

        Args:
            new_hidden: [n, K·H] target states of the n tokens accepted since the last call, up to the one
                before the anchor.
            position: of the anchor in the sequence.
            anchor: its token, whose own state does not exist yet.
            choose: a token [] from logits [V]; slot k's logits depend on the token chosen before it.

        Returns:
            G tokens; their confidence is 1 without a confidence head.

        Raises:
            ValueError: if the states do not end right before the anchor.
        """
        if self.context_length + new_hidden.shape[0] != position:
            raise ValueError(
                f"the anchor is at {position}, but the context has {self.context_length} tokens "
                f"and {new_hidden.shape[0]} new states"
            )
        states = self._states(new_hidden, position, anchor)
        return self._chain(states, anchor, choose)

    def _states(self, new_hidden: Tensor, position: int, anchor: int) -> Tensor:
        model, block, device = self.model, self.block_size, self.model.fc.weight.device
        start = position - new_hidden.shape[0]
        context = model.project(new_hidden.to(device))
        rotary_new = model.rotary(torch.arange(start, position, device=device))
        rotary = model.rotary(torch.arange(position, position + block, device=device))
        layout = build_layout(
            torch.tensor([0, position + 1]),
            torch.tensor([position]),
            block,
            window=model.shape.config.sliding_window,
            device=device,
            backend="sdpa",
        )
        ids = torch.full((block,), model.shape.mask_token_id, device=device)
        ids[0] = anchor
        x = model.embed(ids, self.frozen.embedding)
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            new = layer.keys_values(context, rotary_new)
            cached = self._cache[index]
            keys, values = (
                torch.cat([old[:-1], add, self._blank]) for old, add in zip(cached, new, strict=True)
            )
            self._cache[index] = (keys, values)
            x = layer.update(x, keys, values, rotary, layout)
        return model.finish(x)

    def _chain(self, states: Tensor, anchor: int, choose: Callable[[Tensor], Tensor]) -> Proposal:
        head, confidence_head = self.model.markov_head, self.model.confidence_head
        dtype = self.frozen.head.dtype
        logits = states.to(dtype) @ self.frozen.head.T
        previous = torch.tensor(anchor, device=states.device)
        state = states.new_zeros(head.rank)
        tokens, embeddings = [], []
        for k in range(self.block_size):
            embedding = head.markov_w1(previous)
            features, state = head.step(embedding, states[k], state)
            logits[k] += F.linear(features, head.markov_w2.weight).to(dtype)
            previous = choose(logits[k])
            tokens.append(previous)
            embeddings.append(embedding)
        if confidence_head is None:
            return Proposal(torch.stack(tokens), torch.ones(self.block_size, device=states.device), logits)
        confidence = confidence_head(states, torch.stack(embeddings)).sigmoid()
        return Proposal(torch.stack(tokens), confidence.float(), logits)
