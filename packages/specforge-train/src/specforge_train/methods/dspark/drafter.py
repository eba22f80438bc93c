"""DSpark at inference: one backbone pass a block, its slots chained through the Markov head.

Keys and values of the context are kept a layer, in buffers of fixed places; only the states of newly accepted
tokens are projected. A proposal is one function of tensors of fixed shapes, which on a GPU is recorded and
replayed.

Notation: G slots of the block, C capacity in tokens, K captured layers, H hidden size, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specforge_train.frozen import FrozenTarget
from specforge_train.methods.backbone import Layer
from specforge_train.methods.dspark.model import DSparkModel
from specforge_train.replay import Function, recorded
from specforge_train.verification import GREEDY, Choice, Proposal, Verification

_LEAST_CAPACITY = 512


class DSparkDrafter:
    """Proposes blocks for one sequence at a time; `model` is whole, not sharded."""

    def __init__(self, model: DSparkModel, frozen: FrozenTarget) -> None:
        self.model, self.frozen = model, frozen
        self.block_size = model.shape.config.block_size
        self.context_length = 0
        """Tokens whose states are cached."""
        self._device = model.fc.weight.device
        self._cache: list[tuple[Tensor, Tensor]] = []
        self._steps: dict[Choice, Function] = {}

    def begin(self) -> None:
        """Forget the context."""
        self.context_length = 0

    @torch.no_grad()
    def propose(
        self, new_hidden: Tensor, position: int, anchor: int, rule: Verification = GREEDY
    ) -> Proposal:
        """Draft the tokens after the anchor.

        Args:
            new_hidden: [n, K·H] target states of the n tokens accepted since the last call, up to the one
                before the anchor.
            position: of the anchor in the sequence.
            anchor: its token, whose own state does not exist yet.
            rule: chooses tokens; slot k's logits depend on the token chosen before it.

        Returns:
            G tokens; their confidence is 1 without a confidence head.

        Raises:
            ValueError: if the states do not end right before the anchor.
        """
        start, count = self.context_length, len(new_hidden)
        if start + count != position:
            raise ValueError(
                f"the anchor is at {position}, but the context has {start} tokens and {count} new states"
            )
        fixed = self.block_size + 1
        self._reserve(position + fixed)
        new_hidden = new_hidden.to(self._device)
        if count > fixed:  # a prompt
            self._absorb(new_hidden, torch.arange(start, position, device=self._device))
            start, new_hidden = position, new_hidden[:0]
        # Rows that only fill up are written behind the anchor, where no slot looks, and written over later.
        hidden = F.pad(new_hidden, (0, 0, 0, fixed - len(new_hidden)))
        places = torch.tensor([start, position, anchor]).to(self._device, non_blocking=True)
        inputs = hidden, places, rule.draws(self.block_size, self._device)
        outputs = self._step(rule.choice, inputs)(*inputs)
        self.context_length = position
        return Proposal(*outputs)

    def _step(self, choice: Choice, inputs: tuple[Tensor, Tensor, Tensor]) -> Function:
        """What proposes: recorded once for each way of choosing tokens."""
        if choice not in self._steps:

            def step(hidden: Tensor, places: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                start, position, anchor = places
                self._absorb(hidden, start + torch.arange(len(hidden), device=self._device))
                return self._chain(self._states(position, anchor), anchor, choice, draws)

            self._steps[choice] = recorded(step, inputs) if self._device.type == "cuda" else step
        return self._steps[choice]

    def _reserve(self, length: int) -> None:
        """Make room for the context's first `length` tokens."""
        shape, capacity = self.model.shape, self._cache[0][0].shape[0] if self._cache else 0
        if length <= capacity:
            return
        self._steps.clear()  # they hold the buffers' old places
        grown = max(_LEAST_CAPACITY, 2 * capacity, length)
        empty = self.model.fc.weight.new_zeros(grown, shape.num_kv_heads, shape.head_dim)
        old, self._cache = self._cache, [(empty.clone(), empty.clone()) for _ in self.model.layers]
        for (keys, values), (new_keys, new_values) in zip(old, self._cache, strict=False):
            new_keys[:capacity], new_values[:capacity] = keys, values

    def _absorb(self, hidden: Tensor, positions: Tensor) -> None:
        """Put keys and values of states [n, K·H] at their positions [n]."""
        context, rotary = self.model.project(hidden), self.model.rotary(positions)
        for layer, (keys, values) in zip(self._layers(), self._cache, strict=True):
            new_keys, new_values = layer.keys_values(context, rotary)
            keys.index_copy_(0, positions, new_keys)
            values.index_copy_(0, positions, new_values)

    def _states(self, position: Tensor, anchor: Tensor) -> Tensor:
        """The backbone's states [G, H] of the block behind an anchor; all places are tensors []."""
        model, window = self.model, self.model.shape.config.sliding_window
        slots = torch.arange(self.block_size, device=self._device)
        end = position.expand(self.block_size)
        first, last = torch.zeros_like(slots), torch.full_like(slots, self.block_size)
        context = torch.stack([first, end])
        if window is not None:  # the rule of specforge_kernels.anchored_attention.blocks
            context, last = torch.stack([(end + slots - (window - 1)).clamp(min=0), end]), slots + 1
        intervals, rotary = (context, torch.stack([first, last])), model.rotary(position + slots)
        ids = torch.full_like(slots, model.shape.mask_token_id)
        ids[0] = anchor
        x = model.embed(ids, self.frozen.embedding)
        for layer, cached in zip(self._layers(), self._cache, strict=True):
            x = layer.update(x, *cached, rotary, intervals)
        return model.finish(x)

    def _chain(
        self, states: Tensor, anchor: Tensor, choice: Choice, draws: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [G], confidence [G] and logits [G, V], in the fields' order of `Proposal`."""
        head, confidence_head = self.model.markov_head, self.model.confidence_head
        dtype = self.frozen.head.dtype
        logits = states.to(dtype) @ self.frozen.head.T
        previous, state = anchor, states.new_zeros(head.rank)
        tokens, embeddings = [], []
        for k in range(self.block_size):
            embedding = head.markov_w1(previous)
            features, state = head.step(embedding, states[k], state)
            logits[k] += F.linear(features, head.markov_w2.weight).to(dtype)
            previous = choice(logits[k], draws[k])
            tokens.append(previous)
            embeddings.append(embedding)
        if confidence_head is None:
            confidence = torch.ones(self.block_size, device=states.device)
        else:
            confidence = confidence_head(states, torch.stack(embeddings)).sigmoid().float()
        return torch.stack(tokens), confidence, logits

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]
