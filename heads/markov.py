"""Biases of a block drafter's logits by the draft tokens before (DSpark, github.com/deepseek-ai/DeepSpec)."""

from typing import Literal

import torch
from torch import Tensor, nn

Kind = Literal["vanilla", "gated", "rnn"]

# Shapes: n nodes or positions, H hidden size, r rank, V vocabulary, D number of logits.


class MarkovBias(nn.Module):
    """W2 l, a low-rank bias of D logits, where l depends on e = W1[token before] and on h, the state of the block.

    vanilla   l = e
    gated     l = sigmoid(G [h; e]) * e
    rnn       (g, c, o) = J [s; e; h],  l = tanh(o),  s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c),  s = 0 at first
    """

    def __init__(self, vocab_size: int, rank: int, outputs: int, hidden_size: int, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias [n, D] after the tokens `before_n` and the carried state [n, r] of the next position."""
        latent_nr, carried_nr = self.latent(carried_nr, self.markov_w1(before_n), states_nH)
        return self.markov_w2(latent_nr), carried_nr

    def latent(self, carried_nr: Tensor, embeds_nr: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return l [n, r] and the carried state [n, r] of the next position, which only `rnn` changes."""
        if self.gate_proj is not None:
            return self.gate_proj(torch.cat([states_nH, embeds_nr], -1)).sigmoid() * embeds_nr, carried_nr
        if self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([carried_nr, embeds_nr, states_nH], -1))
            gate_nr, candidate_nr, output_nr = joint.chunk(3, -1)
            gate_nr = gate_nr.sigmoid()
            return output_nr.tanh(), gate_nr * carried_nr + (1 - gate_nr) * candidate_nr.tanh()
        return embeds_nr, carried_nr
