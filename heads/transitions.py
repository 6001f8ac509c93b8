"""Transitions between neighbours in a block: logits of a position that depend on the token before it.

    states of the block ──▶ logits ──▶ candidates of each position ──▶ their scores after a token ──▶ walk

A walk takes the positions in order and draws each token from the softmax of the scores over the candidates, given the
token that it drew before. The decoder walks: it asks for the logits of one level of nodes after the other, so that q is
exact on chains and trees, and a point mass at temperature 0.

    drafter    candidates          score of token b after token a, with h the state of b's position
    DSpark     the vocabulary      U(b) + <W2[b], l(a, h)>
    DFlash 2   the k best by U     U(b) + <A[a] * P h, B[b]>
    LiLiCorr   the k best by U     <out_a, in_b>, see `lattice`

A new kind of transitions is a subclass of these, and an option of `DFlash`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

# Shapes: n nodes, positions or blocks, K positions of a block, k candidates, r rank, H or M hidden size, D logits, X
# values that scores read.

Kind = Literal["vanilla", "gated", "rnn"]


class Block(NamedTuple):
    """Blocks before their walks."""

    states_nKM: Tensor
    features: Callable[[], Tensor]
    """Returns the target's features of the last token that has some, projected, [n, M]."""
    best: Callable[[int], tuple[Tensor, Tensor]]
    """Returns log-probabilities and rows of the logits [n, K, k] of the k best tokens by the states, the best first."""
    tokens: Callable[[Tensor], Tensor]
    """Maps rows of the logits to tokens."""
    embed: Callable[[Tensor], Tensor]


class Transitions(nn.Module, ABC):
    """Scores of the tokens of a position by the token before it."""

    @abstractmethod
    def initial_state(self, block: Block) -> Tensor:
        """Return the recurrent state [n, ...] before the first position of blocks."""

    @abstractmethod
    def step(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        """Return values [n, X] of the tokens before and the states, and the recurrent state of the next position."""

    @abstractmethod
    def forward(self, logits_nD: Tensor, values_nX: Tensor, walks: bool = False) -> Tensor:
        """Return logits [n, D] after the tokens whose values `step` returned; `logits_nD` are those of the states.

        With `walks` those from which a walk draws: -inf for tokens that are no candidates. In training all are finite.
        """

    @abstractmethod
    def score_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that `forward` reads."""


class CandidateTransitions(Transitions):
    """Scores of the `top_k` most likely tokens of each position alone.

    For training, candidates have together the probability that the states' logits give them, which their scores divide.
    """

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k

    def candidates(self, logits_nD: Tensor, values_nX: Tensor) -> Tensor:
        """Return the candidates [n, k], which are rows of the logits."""
        return logits_nD.topk(self.top_k).indices

    @abstractmethod
    def scores(self, unary_nk: Tensor, candidates_nk: Tensor, values_nX: Tensor) -> Tensor:
        """Return the scores [n, k] of candidates, whose logits by the states are `unary_nk`."""

    def forward(self, logits_nD: Tensor, values_nX: Tensor, walks: bool = False) -> Tensor:
        candidates_nk = self.candidates(logits_nD, values_nX)
        unary_nk = logits_nD.expand(*candidates_nk.shape[:-1], -1).gather(-1, candidates_nk)
        scores_nk = self.scores(unary_nk, candidates_nk, values_nX)
        if not walks:
            scores_nk = scores_nk + unary_nk.logsumexp(-1, keepdim=True) - scores_nk.logsumexp(-1, keepdim=True)
        others_nD = torch.full_like(logits_nD, -torch.inf) if walks else logits_nD
        others_nD = others_nD.expand(*scores_nk.shape[:-1], -1)
        return others_nD.scatter(-1, candidates_nk.expand_as(scores_nk), scores_nk.to(others_nD.dtype))


@dataclass(frozen=True)
class SelectorOptions:
    """Options of a `CandidateSelector`; none with a rank of 0."""

    selector_rank: int = 0
    selector_top_k: int = 16


class CandidateSelector(CandidateTransitions):
    """DFlash 2: U(b) + <A[a] * P h, B[b]>, with codebooks A and B of rank r.

    Source: the package dflash 0.1.0 of z-lab.
    """

    def __init__(self, vocab_size: int, outputs: int, hidden_size: int, options: SelectorOptions) -> None:
        super().__init__(options.selector_top_k)
        self.options, rank = options, options.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(outputs, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def initial_state(self, block: Block) -> Tensor:
        return block.states_nKM[..., 0, :0]

    def step(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
        return self.predecessor_codebook[before_n] * self.hidden_projection(states_nH), carried_nr

    def scores(self, unary_nk: Tensor, candidates_nk: Tensor, values_nX: Tensor) -> Tensor:
        return unary_nk + (self.successor_codebook[candidates_nk] @ values_nX[..., None])[..., 0]

    def score_parameters(self) -> list[nn.Parameter]:
        return [self.successor_codebook]


@dataclass(frozen=True)
class MarkovOptions:
    """Options of a `MarkovBias`; none with a rank of 0."""

    markov_rank: int = 0
    markov_type: Kind = "vanilla"


class MarkovBias(Transitions):
    """DSpark: W2 l, a low-rank bias of D logits. l depends on e = W1[token before] and on h, the state of the block.

    Source: github.com/deepseek-ai/DeepSpec.

    vanilla   l = e
    gated     l = sigmoid(G [h; e]) * e
    rnn       (g, c, o) = J [s; e; h],  l = tanh(o),  s <- sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c),  s = 0 at first
    """

    def __init__(self, vocab_size: int, outputs: int, hidden_size: int, options: MarkovOptions) -> None:
        super().__init__()
        self.options, rank, kind = options, options.markov_rank, options.markov_type
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, outputs, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(hidden_size + 2 * rank, 3 * rank) if kind == "rnn" else None
        nn.init.zeros_(self.markov_w2.weight)

    def initial_state(self, block: Block) -> Tensor:
        return block.states_nKM.new_zeros(*block.states_nKM.shape[:-2], self.markov_w2.in_features)

    def step(self, carried_nr: Tensor, before_n: Tensor, states_nH: Tensor) -> tuple[Tensor, Tensor]:
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

    def forward(self, logits_nD: Tensor, values_nX: Tensor, walks: bool = False) -> Tensor:
        return logits_nD + self.markov_w2(values_nX[..., -self.markov_w2.in_features :])

    def score_parameters(self) -> list[nn.Parameter]:
        return list(self.markov_w2.parameters())
