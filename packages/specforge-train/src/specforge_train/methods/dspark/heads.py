"""DSpark's heads over the backbone's states (arXiv 2607.05147).

Markov head, a logit bias `W2 z_k` from the token before slot k: with `e_k = W1[token_{p+k}]`, the backbone's
state `h_k`, and the block's own state `s_k`, `s_0 = 0`,

    vanilla  z_k = e_k
    gated    z_k = sigmoid(W_g [h_k; e_k] + b) · e_k
    rnn      [g; c; o] = W_j [s_k; e_k; h_k] + b
             z_k = tanh(o),   s_{k+1} = sigmoid(g) · s_k + (1 - sigmoid(g)) · tanh(c)

Confidence head: `w · [h_k; e_k] + b` (or of h_k alone), the logit of the slot's acceptance probability.

Notation: N anchors, G block, R rank, H hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class VanillaMarkov(nn.Module):
    """The Markov head whose features are the previous token's embedding."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features and next state of one slot, from e [..., R], h [..., H] and the state [..., R]."""
        return embedding, state

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Features of whole blocks: e [N, G, R], h [N, G, H] -> z [N, G, R]."""
        return self.step(embedding, hidden, embedding)[0]


class GatedMarkov(VanillaMarkov):
    """The Markov head with a gate of state and embedding."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedding], dim=-1)))
        return gate * embedding, state


class RnnMarkov(VanillaMarkov):
    """The Markov head with a gated state over the block."""

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__(vocab_size, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def _advance(self, given: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        recurrent = F.linear(state, self.joint_proj.weight[:, : self.rank])
        gate, candidate, output = (given + recurrent).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def _given(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        weight = self.joint_proj.weight[:, self.rank :]
        return F.linear(torch.cat([embedding, hidden], dim=-1), weight, self.joint_proj.bias)

    def step(self, embedding: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self._advance(self._given(embedding, hidden), state)

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        # Only the state's part of the projection waits for the slot before; the rest is one product.
        given = self._given(embedding, hidden)
        state = torch.zeros_like(embedding[:, 0])
        features = []
        for k in range(embedding.shape[1]):
            output, state = self._advance(given[:, k], state)
            features.append(output)
        return torch.stack(features, dim=1)


MARKOV_HEADS: dict[str, type[VanillaMarkov]] = {
    "vanilla": VanillaMarkov,
    "gated": GatedMarkov,
    "rnn": RnnMarkov,
}


class ConfidenceHead(nn.Module):
    """The linear head that predicts a slot's acceptance probability; computed in float32, as it is served."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        """`markov_rank` is 0 for a head of the state alone."""
        super().__init__()
        self.reads_markov = markov_rank > 0
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """h [..., H] and e [..., R] -> logits [...]."""
        features = torch.cat([hidden, embedding], dim=-1) if self.reads_markov else hidden
        dtype = torch.promote_types(features.dtype, torch.float32)
        return F.linear(features.to(dtype), self.proj.weight.to(dtype), self.proj.bias.to(dtype)).squeeze(-1)
