"""One text's draft while it grows: what a policy decides with and what a drafter extends."""

from typing import Protocol

import torch
from torch import Tensor

from draftsmith.decode.sampling import Processors, Rng
from draftsmith.heads.draft_tree import ROOT, Draft, Drawing

# Shapes: n nodes, V vocabulary of the target.


class BuilderSequence(Protocol):
    """The fields of a `DecodeSequence` that a draft is built from."""

    tokens: list[int]
    padding: list[int]
    number: int
    rng: Rng


class DraftBuilder:
    """A tree of draft tokens below one text's last committed token.

    Tokens are either drawn, which makes a `DrawnDraft`, or chosen, which makes a `Draft`; never both in one tree.
    """

    def __init__(
        self, sequence: BuilderSequence, room: int, processors: Processors, shared: tuple[int, int] | None = None
    ) -> None:
        self.room = room
        """The deepest that a node may stand."""
        self.greedy = processors.greedy
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._sequence, self._processors = sequence, processors
        self._shared = shared
        """(tokens that both know, the target's vocabulary), where the two vocabularies are padded differently."""
        self.kept: list[int] | None = None
        """Nodes of the draft, in its order, where some were pruned."""
        self.confidence: list[float] = []
        """What the policy thought of each node of the draft before it was verified, for policies that learn."""
        self.survival: list[float] = []
        """The chance that each node of the draft is accepted, as the policy saw it, for the same."""
        self.ranks: list[int] = []
        """The place of each node of the draft among its siblings, for the same."""
        self.estimates: dict[int, float] = {}
        """By node, how likely the drafter itself takes the next token to be accepted, where it makes such a guess."""
        self.passes = 0
        """Steps of the drafter, for policies that count them."""
        self._drawing: Drawing | None = None

    def depth(self, node: int) -> int:
        """Draft tokens on the path to `node`; 0 for `ROOT`."""
        return 0 if node == ROOT else self.depths[node]

    def probabilities(self, logits_nV: Tensor, nodes: list[int]) -> Tensor:
        """q behind `nodes`, after the run's processors: [n, V]; all zero where they leave nothing.

        When greedy, the softmax of the processed logits: a confidence, not what is drawn from.
        """
        scores_nV = self._scores(logits_nV, nodes)
        return scores_nV.softmax(-1).nan_to_num(0.0)

    def best(self, logits_V: Tensor, node: int) -> int | None:
        """The most likely token behind `node`; None where the processors leave nothing."""
        if self._shared is None and self._processors.none:
            return int(logits_V.argmax())
        scores_V = self._scores(logits_V[None], [node])[0]
        token = int(scores_V.argmax())
        if self._processors.may_empty and float(scores_V[token]) == -torch.inf:
            return None
        return token

    def follow(self, logits_V: Tensor, parent: int) -> int | None:
        """One token behind `parent` as the run decodes: the best when greedy, else a draw. The new node, or None."""
        if self.greedy:
            token = self.best(logits_V, parent)
            return None if token is None else self.choose(parent, token)
        return self.draw(parent, self.probabilities(logits_V[None], [parent])[0])

    def follow_q(self, q_V: Tensor, parent: int) -> int | None:
        """`follow` for a policy that has looked at `probabilities` already."""
        if not q_V.any():
            return None
        return self.choose(parent, int(q_V.argmax())) if self.greedy else self.draw(parent, q_V)

    def choose(self, parent: int, token: int) -> int:
        """Add a token that was picked in whatever way: its node."""
        assert self._drawing is None, "a drawn draft takes no chosen tokens"
        return self._add(parent, token)

    def draw(self, parent: int, q_V: Tensor, *, replacement: bool = False) -> int | None:
        """Draw one more child of `parent` from q: its node, or None when nothing is left to draw."""
        if self._drawing is None:
            assert not self.tokens, "a chosen draft takes no drawn tokens"
            self._drawing = Drawing(self._sequence.rng.categorical, replacement=replacement)
        if not q_V.any():
            return None
        token = self._drawing.add(parent, q_V)
        return None if token is None else self._add(parent, token)

    def draft(self) -> Draft:
        """All tokens so far."""
        if self._drawing is not None:
            return self._drawing.draft()
        return Draft(tuple(self.tokens), tuple(self.parents))

    def pruned(self, nodes: list[int]) -> Draft:
        """A draft of these nodes alone, each after its parent: chosen, even where the tokens were drawn."""
        self.kept = nodes
        return self.draft().keep(nodes)

    def origin(self, path: tuple[int, ...]) -> list[int]:
        """Nodes of the draft as nodes of this tree."""
        return list(path) if self.kept is None else [self.kept[node] for node in path]

    def _add(self, parent: int, token: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        assert self.depths[-1] <= self.room, "a policy drafted past the room that is left"
        return len(self.tokens) - 1

    def _scores(self, logits_nV: Tensor, nodes: list[int]) -> Tensor:
        def contexts() -> list[list[int]]:
            return [self._before(node) for node in nodes]

        return self._processors.scores(self._fitted(logits_nV), contexts, self._sequence.number)

    def _before(self, node: int) -> list[int]:
        path = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return self._sequence.padding + self._sequence.tokens + path[::-1]

    def _fitted(self, logits_nV: Tensor) -> Tensor:
        """Logits over the target's vocabulary, where the drafter's is padded to another size."""
        if self._shared is None:
            return logits_nV
        shared, vocabulary = self._shared
        fitted_nV = logits_nV.new_full((logits_nV.shape[0], vocabulary), -torch.inf)
        fitted_nV[:, :shared] = logits_nV[:, :shared]
        return fitted_nV
