"""The drafts of all sequences of a round, with their tokens on the device."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftsmith.decode.cache.committed import CommittedTokens, Contexts
from draftsmith.heads.draft_tree import NO_NODE, ROOT, Draft, Parents, chain_parents, depths_of
from draftsmith.heads.rows import Counts, constant, upload

# Shapes: B sequences, N draft nodes, P = N + 1 positions, D levels, n nodes of each sequence, V vocabulary.

NO_DRAFT = Draft()


class DraftBatch:
    """Drafts of B sequences, of any shape in each row: chains and trees, drawn from q and chosen ones, and none.

    Position 0 is the last committed token of a sequence, position i + 1 its node i.

    Args:
        tokens_BN: padded where a sequence has fewer nodes.
        valid_BN: bool, False where a sequence has no such node; no node of it is below one. None: all sequences have
            all nodes.
        drafts: the draft of each sequence; None for chains whose tokens only the device knows, until `read`.
        tree_B2N: the position of each node's parent, and its depth; 0 where a sequence has no such node. None for
            chains.
        q_BNV: the distribution after each node's parent, where all tokens were drawn from it; None: `drafts` have it.
    """

    def __init__(
        self,
        tokens_BN: Tensor,
        valid_BN: Tensor | None = None,
        drafts: list[Draft] | None = None,
        tree_B2N: Tensor | None = None,
        q_BNV: Tensor | None = None,
    ) -> None:
        self.tokens_BN, self.valid_BN, self.drafts = tokens_BN, valid_BN, drafts
        self._tree_B2N, self._q_BNV = tree_B2N, q_BNV
        self.is_chain = drafts is None or all(draft.is_chain for draft in drafts)
        """Every token of every sequence is the child of the one before it."""

    @staticmethod
    def empty(count: int, device: torch.device) -> "DraftBatch":
        """Return drafts without tokens for this number of sequences."""
        return DraftBatch(torch.empty(count, 0, dtype=torch.int64, device=device), drafts=[NO_DRAFT] * count)

    @staticmethod
    def of(drafts: Sequence[Draft], device: torch.device | None = None) -> "DraftBatch":
        """Return drafts that the host built, in one upload."""
        most, device = max(map(len, drafts)), device or torch.device("cpu")
        if most == 0:
            return DraftBatch.empty(len(drafts), device)
        rows = []
        for draft in drafts:
            missing = most - len(draft)
            # Where a drawn draft has no node, its first token stands, so that p/q is a number everywhere.
            rows.append([*draft.tokens, *[draft.tokens[0] if draft.tokens else 0] * missing])
            rows.append([parent + 1 for parent in draft.parents] + [0] * missing)
            rows.append([*draft.depths, *[0] * missing])
        values_B3N = upload(rows, device).unflatten(0, (-1, 3))
        valid_BN = None if min(map(len, drafts)) == most else values_B3N[:, 2] > 0
        return DraftBatch(values_B3N[:, 0], valid_BN, list(drafts), values_B3N[:, 1:])

    @property
    def drawn(self) -> bool:
        """Whether the tokens of all sequences were drawn from q."""
        return self._q_BNV is not None or (self.drafts is not None and all(draft.drawn for draft in self.drafts))

    @property
    def q_BNV(self) -> Tensor:
        """The distribution after each node's parent, with all logits processors applied: [B, N, V].

        Siblings have the same, and each was drawn without the earlier ones.
        """
        if self._q_BNV is None:
            assert self.drawn, "the tokens were chosen"
            rows = [draft.q for draft in self.drafts or ()]
            self._q_BNV = torch.stack([torch.stack([*q, *[q[0]] * (len(self) - len(q))]) for q in rows])
        return self._q_BNV

    @property
    def shapes(self) -> list[Parents]:
        """The parents of each sequence's nodes, or one entry for all sequences."""
        if self.is_chain or self.drafts is None:
            return [chain_parents(len(self))]
        shapes = [draft.parents for draft in self.drafts]
        return shapes[:1] if len(set(shapes)) == 1 else shapes

    @cached_property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return max(max(depths_of(shape), default=0) for shape in self.shapes)

    def row(self, row: int) -> tuple[Parents, Sequence[Tensor] | None]:
        """Return the shape of one sequence's draft, and the q [V] of each node or None; see `valid_BN`."""
        shape = chain_parents(len(self)) if self.drafts is None else self.drafts[row].parents
        if self._q_BNV is not None:
            return shape, self._q_BNV[row].unbind()
        return shape, self.drafts[row].q if self.drafts and self.drafts[row].drawn else None

    def parent_positions(self) -> Tensor:
        """Return the position [1, N] or [B, N] of each node's parent."""
        if self.is_chain or self._tree_B2N is None:
            return constant((tuple(range(len(self))),), self.tokens_BN.device)
        return self._tree_B2N[:, 0]

    def depths(self) -> Tensor:
        """Return the depth [1, P] or [B, P] of each position."""
        if self.is_chain or self._tree_B2N is None:
            return constant((tuple(range(len(self) + 1)),), self.tokens_BN.device)
        return pad(self._tree_B2N[:, 1], (1, 0))

    def paths(self, nodes_Bn: Tensor) -> Tensor:
        """Return the nodes [B, n, D] on the paths to these nodes or `ROOT`, then -1."""
        D, steps_D = self.depth, torch.arange(self.depth, device=nodes_Bn.device)
        if self.is_chain:
            return torch.where(steps_D <= nodes_Bn[..., None], steps_D, -1)
        # One column more takes what is written after the root is reached.
        path_BnD = torch.full((*nodes_Bn.shape, D + 1), -1, device=nodes_Bn.device)
        above_BP = pad(self.parent_positions() - 1, (1, 0), value=ROOT).expand(len(nodes_Bn), -1)
        depth_BP = self.depths().expand_as(above_BP)
        for _ in range(D):
            path_BnD.scatter_(2, (depth_BP.gather(1, nodes_Bn + 1)[..., None] - 1) % (D + 1), nodes_Bn[..., None])
            nodes_Bn = above_BP.gather(1, nodes_Bn + 1)
        return path_BnD[..., :D]

    def contexts(self, committed: CommittedTokens, indices: Sequence[int]) -> Contexts:
        """Return the tokens before each position of each sequence; `indices`: of the sequences in the whole batch."""
        (B, N), device = self.tokens_BN.shape, self.tokens_BN.device
        rows = [row for row in range(B) for _ in range(N + 1)]
        sequences = [indices[row] for row in rows]
        if self.is_chain or self.drafts is None:
            depths = Counts([*range(N + 1)] * B, device, lambda: torch.arange(N + 1, device=device).repeat(B))
            paths_nD = self.tokens_BN.repeat_interleave(N + 1, 0) if N else None
            return committed.with_paths(rows, paths_nD, depths, sequences)
        nodes_BP = torch.arange(-1, N, device=device).expand(B, -1)
        path_BPD = self.paths(nodes_BP).clamp_min(0)
        tokens_BPD = self.tokens_BN[:, None].expand(-1, N + 1, -1).gather(2, path_BPD)
        values = [depth for draft in self.drafts for depth in (0, *draft.depths, *[0] * (N - len(draft)))]
        depths = Counts(values, device, self.depths().flatten)
        return committed.with_paths(rows, tokens_BPD.flatten(0, 1), depths, sequences)

    def part(self, rows: list[int]) -> "DraftBatch":
        """Return the drafts of these sequences, without positions that none of them has."""
        if self.drafts is None or len(rows) == len(self.drafts):
            return self
        drafts, index_b = [self.drafts[row] for row in rows], constant(tuple(rows), self.tokens_BN.device)
        most, valid_bN = max(map(len, drafts)), None
        if self.valid_BN is not None and min(map(len, drafts)) < most:
            valid_bN = self.valid_BN[index_b, :most]
        tree_b2N = None if self._tree_B2N is None else self._tree_B2N[index_b, :, :most]
        return DraftBatch(self.tokens_BN[index_b, :most], valid_bN, drafts, tree_b2N)

    def packed(self) -> list[Tensor]:
        """Return the tensors [B, N] that `read` needs: none where the drafts are known."""
        if self.drafts is not None:
            return []
        return [self.tokens_BN if self.valid_BN is None else self.tokens_BN.masked_fill(~self.valid_BN, NO_NODE)]

    def read(self, values: Sequence[Sequence[float]]) -> list[Draft]:
        """Return the drafts, from the packed values; -1 is the token of a node that a sequence does not have."""
        if self.drafts is None:
            parents = chain_parents(len(self))
            self.drafts = [Draft(tuple(map(int, row)), parents) for row in values]
        return self.drafts

    def __len__(self) -> int:
        return self.tokens_BN.shape[1]
