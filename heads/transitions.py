"""Transitions between neighbours in a block: logits of a position that depend on the token before it.

    states of the block ──▶ logits ──▶ candidates of each position ──▶ their scores after a token ──▶ walk

A walk takes the positions in order and draws each token from the softmax of the scores over the candidates, given the
token that it drew before. The decoder walks: it asks for the logits of one level of nodes after the other, so that q is
exact on chains and trees, and a point mass at temperature 0.

    drafter    candidates          score of token b after token a, with h the state of b's position
    DSpark     the vocabulary      U(b) + <W2[b], l(a, h)>

A new kind of transitions is a subclass here, and an option of `DFlash`.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor, nn

# Shapes: n nodes or positions, r rank, H hidden size, D logits, X values that scores read.

Kind = Literal["vanilla", "gated", "rnn"]


class Transitions(nn.Module, ABC):
    """Scores of the tokens of a position by the token before it."""

    @abstractmethod
    def begin(self, states_nH: Tensor) -> Tensor:
        """Return what the first position of blocks receives from the positions before it, [n, ...]."""

    @abstractmethod
    def read(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [n, X] of the tokens before and the states, and what the next position receives."""

    @abstractmethod
    def forward(self, logits_nD: Tensor, values_nX: Tensor) -> Tensor:
        """Return logits [n, D] after the tokens whose values `read` returned; `logits_nD` are those of the states."""

    @abstractmethod
    def score_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `forward` reads."""


class MarkovBias(Transitions):
    """DSpark: W2 l, a low-rank bias of D logits. l depends on e = W1[token before] and on h, the state of the block.

    Source: github.com/deepseek-ai/DeepSpec.

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

    def begin(self, states_nH: Tensor) -> Tensor:
        return states_nH.new_zeros(*states_nH.shape[:-1], self.markov_w2.in_features)

    def read(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return e, which confidence heads read, and l where it is another; only `rnn` carries a state."""
        embeds_nr = self.markov_w1(before_n)
        if self.gate_proj is not None:
            gate_nr = self.gate_proj(torch.cat([states_nH, embeds_nr], -1)).sigmoid()
            return torch.cat([embeds_nr, gate_nr * embeds_nr], -1), carried_nr
        if self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([carried_nr, embeds_nr, states_nH], -1))
            gate_nr, candidate_nr, output_nr = joint.chunk(3, -1)
            gate_nr = gate_nr.sigmoid()
            carried_nr = gate_nr * carried_nr + (1 - gate_nr) * candidate_nr.tanh()
            return torch.cat([embeds_nr, output_nr.tanh()], -1), carried_nr
        return embeds_nr, carried_nr

    def forward(self, logits_nD: Tensor, values_nX: Tensor) -> Tensor:
        return logits_nD + self.markov_w2(values_nX[..., -self.markov_w2.in_features :])

    def score_parameters(self) -> list[nn.Parameter]:
        return list(self.markov_w2.parameters())
