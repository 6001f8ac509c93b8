"""The draft of one text while it is built: policies add tokens to it and drafters read it."""

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from draftsmith.decode.cache.committed import CommittedText, CommittedTokens, Contexts
from draftsmith.decode.drafts.drawing import Drawing
from draftsmith.decode.policies.requests import Look, Request
from draftsmith.decode.sampling import Processors
from draftsmith.heads.draft_tree import ROOT, Draft

# Shapes: n nodes of one text, m nodes of several texts, V vocabulary of the target.


class DraftBuilder:
    """A tree of draft tokens after the last committed token of one text.

    Tokens are either drawn from q or chosen; one tree never has both.
    """

    def __init__(
        self,
        sequence: CommittedText,
        room: int,
        processors: Processors,
        shared: tuple[int, int] | None = None,
    ) -> None:
        self.room = room
        """Maximum depth of a node."""
        self.greedy = processors.greedy
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.may_empty = processors.may_empty
        self.sequence, self.processors = sequence, processors
        self.shared = shared
        """(tokens that the drafter may draft, size of the target's vocabulary), where it may not draft all."""
        self.slots: dict[int, int] = {}
        """For each node that the drafter has read, its number in the order in which it was read, with padding."""
        self.kept: list[int] | None = None
        """Nodes of the draft, in its order; None where no node was pruned."""
        self.confidence: list[float] = []
        """For each node of the draft, the probability under q that the policy decided by, for `Policy.observe`."""
        self.survival: list[float] = []
        """For each node of the draft, the policy's estimate of the probability that the path to it is accepted."""
        self.estimates: dict[int, float] = {}
        """By node, the drafter's own estimate that the next token is accepted; see `Drafter.confidences`."""
        self.found = 0
        """Number of retrieved tokens, of which the policy may keep fewer, see `Policy.retrieved`."""
        self.passes = 0
        """Forward passes of the drafter, for policies that count them."""
        self._drawing: Drawing | None = None

    def depth(self, node: int) -> int:
        """Return the number of draft tokens on the path to `node`; 0 for `ROOT`."""
        return 0 if node == ROOT else self.depths[node]

    def follow(self, look: Look) -> Generator[Request, Look, int | None]:
        """Add a child of the only node that was read, the most likely when greedy, else drawn; return it or None."""
        if self.greedy:
            return self.choose(look.parent, look.tokens[0][0]) if look.values[0][0] > 0 else None
        (children,) = (yield Request(draw=[1])).children
        return children[0][0] if children else None

    def choose(self, parent: int, token: int) -> int:
        """Add a token that was chosen in any way as a child of `parent`, and return its node."""
        assert self._drawing is None, "chosen tokens cannot be added to a drawn draft"
        return self.add(parent, token)

    def drawing(self) -> Drawing:
        """Return the `Drawing` of this draft, all of whose tokens are drawn."""
        if self._drawing is None:
            assert not self.tokens, "drawn tokens cannot be added to a chosen draft"
            self._drawing = Drawing()
        return self._drawing

    def draft(self) -> Draft:
        """Return the draft of all tokens so far."""
        if self._drawing is not None:
            return self._drawing.draft()
        return Draft(tuple(self.tokens), tuple(self.parents))

    def pruned(self, nodes: list[int]) -> Draft:
        """Return a draft of these nodes, each after its parent: a chosen draft, even where the tokens were drawn."""
        self.kept = nodes
        return self.draft().keep(nodes)

    def read_slots(self, path: tuple[int, ...]) -> list[int]:
        """Return the slots of those nodes on a path of the draft that the drafter has read."""
        return [self.slots[node] for node in self.origin(path) if node in self.slots]

    def origin(self, path: tuple[int, ...]) -> list[int]:
        """Return the nodes of this tree that nodes of the draft stand for."""
        return list(path) if self.kept is None else [self.kept[node] for node in path]

    def add(self, parent: int, token: int) -> int:
        """Add a token that was chosen, or that `drawing` holds, as a child of `parent`, and return its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depth(parent) + 1)
        assert self.depths[-1] <= self.room, "the policy drafted deeper than `room`"
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Return the tokens on the path to `node`."""
        path = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


def probabilities(
    builders: Sequence[DraftBuilder],
    nodes: Mapping[int, Sequence[int]],
    logits_mV: Tensor,
    committed: CommittedTokens | None = None,
) -> Tensor:
    """Return q after the nodes of several texts, one text after the other, with all logits processors applied: [m, V].

    A row is zero where the processors forbid every token. Under greedy decoding, the softmax of the processed logits: a
    measure of confidence, since nothing is drawn.

    Args:
        builders: of all texts of the batch.
        nodes: by the row of a text in the batch.
        committed: the tokens of the batch, for processors that read them; made here where they are not kept.
    """

    def contexts() -> Contexts:
        before = committed or CommittedTokens(
            [builder.sequence.padding + builder.sequence.tokens for builder in builders], logits_mV.device
        )
        rows = [row for row, own in nodes.items() for _ in own]
        paths = [builders[row].path(node) for row, own in nodes.items() for node in own]
        return before.with_tokens(rows, paths, [builders[row].sequence.number for row in rows])

    first = builders[0]
    scores_mV = first.processors.scores(fitted(logits_mV, first.shared), contexts)
    return scores_mV.softmax(-1).nan_to_num(0.0)


def fitted(logits_nV: Tensor, shared: tuple[int, int] | None) -> Tensor:
    """Return logits [..., V] over the target's vocabulary: -inf for tokens that the drafter may not draft."""
    if shared is None:
        return logits_nV
    tokens, vocabulary = shared
    fitted_nV = logits_nV.new_full((*logits_nV.shape[:-1], vocabulary), -torch.inf)
    fitted_nV[..., :tokens] = logits_nV[..., :tokens]
    return fitted_nV
