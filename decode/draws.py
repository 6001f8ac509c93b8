"""Random draws for several texts at once, as tensors: verification rules and drafts of fixed shape use them.

Every text has a source of its own, so that its draws do not depend on the texts beside it. `SeededDraws` reads a block
of uniform numbers of each source, and everything else stays on the device. For any other `Rng`, such as the one with
which the exact tests enumerate all outcomes, `RowDraws` calls its two functions.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from draftsmith.decode.mixed_batch import MixedBatch
from draftsmith.decode.sampling import Rng, SeededRng, index_at
from draftsmith.heads.draft_tree import DraftBatch, children_of

NOT_DRAWN = -2
"""In place of a token that nothing has drawn; no node of a draft holds it."""

# Shapes: B texts, N tests or nodes, P nodes and the root, V vocabulary.


class Draws(Protocol):
    """Random draws for B texts. A row that is not active draws nothing, and its result has no meaning."""

    def categorical(self, weights_BV: Tensor, active_B: Tensor | None = None) -> Tensor:
        """Return [B] int64: for each row an index with probability proportional to its weights (not all zero)."""
        ...

    def bernoulli(self, probability_B: Tensor, active_B: Tensor) -> Tensor:
        """Return [B] bool: True with this probability; values of 1 and above are certain."""
        ...

    def first(self, probability_BN: Tensor, outcome: bool, valid_BN: Tensor | None = None) -> Tensor:
        """Make Bernoulli draws in order until one equals `outcome`: return its index [B], N where none does.

        Draws that are not valid are skipped.
        """
        ...

    def along(self, weights_BPV: Tensor, draft: DraftBatch | MixedBatch) -> Tensor:
        """Return [B, P]: a token after every place, with probability proportional to its weights [V].

        Only the tokens along one path may be used: the one on which each node holds the token that was drawn after its
        parent. Other tokens have no meaning. Only the caller knows the number of draws on the path, and takes them from
        the sources.
        """
        ...


class SeededDraws:
    """Draws from one block of uniform numbers per text, which is read at once.

    Args:
        rngs: the source of each text.
        most: the most draws that any row makes.
    """

    def __init__(self, rngs: Sequence[SeededRng], most: int, device: torch.device) -> None:
        blocks = [rng.block(most) for rng in rngs]
        uniform_BS = torch.stack(blocks) if len(blocks) > 1 else blocks[0][None]
        self._uniform_BS = uniform_BS.to(device, non_blocking=True)
        self.made = 0
        """Number of draws that every row has made."""
        self._more_B: Tensor | None = None
        """Draws after these, whose number depends on outcomes; None while all rows have made the same number."""

    @property
    def made_B(self) -> Tensor | None:
        """Number of draws [B] that each row has made; None while it is `made` for all."""
        return None if self._more_B is None else self._more_B + self.made

    def block(self, count: int) -> Tensor:
        """Return the next `count` uniform numbers [B, count] of every row; `skip` takes them from the block."""
        assert self._more_B is None, "rows have made different numbers of draws"
        return self._uniform_BS[:, self.made : self.made + count]

    def skip(self, count: int) -> None:
        """Count the numbers that the last `block` returned as draws of every row."""
        self.made += count

    def categorical(self, weights_BV: Tensor, active_B: Tensor | None = None) -> Tensor:
        index_B1 = index_at(weights_BV, self._next(active_B))
        return index_B1[:, 0] if active_B is None else index_B1[:, 0].clamp_max_(weights_BV.shape[1] - 1)

    def bernoulli(self, probability_B: Tensor, active_B: Tensor) -> Tensor:
        return self._next(active_B)[:, 0] < probability_B

    def first(self, probability_BN: Tensor, outcome: bool, valid_BN: Tensor | None = None) -> Tensor:
        N = probability_BN.shape[1]
        order_BN = None if valid_BN is None else valid_BN.long().cumsum(1)
        if order_BN is None and self._more_B is None:
            uniform_BN = self._uniform_BS[:, self.made : self.made + N]
        else:
            place_BN = (
                torch.arange(N, device=probability_BN.device) if order_BN is None else (order_BN - 1).clamp_min(0)
            )
            more_B1 = 0 if self._more_B is None else self._more_B[:, None]
            uniform_BN = self._uniform_BS.gather(1, (place_BN + more_B1 + self.made).expand(probability_BN.shape))
        hit_BN = uniform_BN < probability_BN if outcome else uniform_BN >= probability_BN
        if valid_BN is not None:
            hit_BN = hit_BN & valid_BN
        # The position of the first hit: the number of tests before which no hit has been.
        index_B = (hit_BN.cumsum(1) == 0).sum(1)
        if order_BN is None:
            drawn_B = (index_B + 1).clamp_max(N)
        else:
            drawn_B = order_BN.gather(1, index_B.clamp_max(N - 1)[:, None])[:, 0]
        self._more_B = drawn_B if self._more_B is None else self._more_B + drawn_B
        return index_B

    def along(self, weights_BPV: Tensor, draft: DraftBatch | MixedBatch) -> Tensor:
        # Places of equal depth use the same random number: no path has two of them.
        if self._more_B is None and draft.is_chain:
            uniform_BP = self._uniform_BS[:, self.made : self.made + len(draft) + 1]
        else:
            more_B1 = 0 if self._more_B is None else self._more_B[:, None]
            places_BP = draft.depths() + self.made + more_B1
            uniform_BP = self._uniform_BS.gather(1, places_BP.expand(weights_BPV.shape[:2]))
        return index_at(weights_BPV, uniform_BP[..., None])[..., 0]

    def _next(self, active_B: Tensor | None) -> Tensor:
        """Return the next uniform number [B, 1] of every row, and count it where the row is active."""
        if self._more_B is None and active_B is None:
            self.made += 1
            return self._uniform_BS[:, self.made - 1 : self.made]
        if self._more_B is None:
            assert active_B is not None
            self._more_B = torch.zeros_like(active_B, dtype=torch.int64)
        uniform_B1 = self._uniform_BS.gather(1, (self._more_B + self.made)[:, None])
        if active_B is None:
            self.made += 1
        else:
            self._more_B = self._more_B + active_B
        return uniform_B1


class RowDraws:
    """Draws from any `Rng`, one row after the other."""

    def __init__(self, rngs: Sequence[Rng]) -> None:
        self._rngs = rngs
        self.last: list[Any] = [None] * len(rngs)
        """The last token of each row as its `Rng` returned it, which may stand for several outcomes."""

    def categorical(self, weights_BV: Tensor, active_B: Tensor | None = None) -> Tensor:
        active = [True] * len(self._rngs) if active_B is None else active_B.tolist()
        tokens = []
        for row, (rng, weights_V) in enumerate(zip(self._rngs, weights_BV.unbind(), strict=True)):
            if active[row]:
                self.last[row] = rng.categorical(weights_V)
            tokens.append(self.last[row] if isinstance(self.last[row], int) else 0)
        return torch.tensor(tokens, device=weights_BV.device)

    def bernoulli(self, probability_B: Tensor, active_B: Tensor) -> Tensor:
        rows = zip(self._rngs, probability_B.tolist(), active_B.tolist(), strict=True)
        outcomes = [active and rng.bernoulli(probability) for rng, probability, active in rows]
        return torch.tensor(outcomes, device=probability_B.device)

    def first(self, probability_BN: Tensor, outcome: bool, valid_BN: Tensor | None = None) -> Tensor:
        valid_BN = torch.ones_like(probability_BN, dtype=torch.bool) if valid_BN is None else valid_BN
        rows = zip(self._rngs, probability_BN.tolist(), valid_BN.tolist(), strict=True)
        indices = [_first(rng, probabilities, valid, outcome) for rng, probabilities, valid in rows]
        return torch.tensor(indices, device=probability_BN.device)

    def along(self, weights_BPV: Tensor, draft: DraftBatch | MixedBatch) -> Tensor:
        B, places = weights_BPV.shape[:2]
        tokens = [[NOT_DRAWN] * places for _ in range(B)]
        nodes = draft.tokens_BN.tolist()
        valid = None if draft.valid_BN is None else draft.valid_BN.tolist()
        for row, (rng, weights_PV) in enumerate(zip(self._rngs, weights_BPV.unbind(), strict=True)):
            place: int | None = 0
            children = children_of(draft.parents_of(row))
            while place is not None:
                self.last[row] = rng.categorical(weights_PV[place])
                here, place = place, None
                for child in children[here]:
                    exists = valid is None or valid[row][child]
                    if exists and place is None and self.last[row] == nodes[row][child]:
                        place = child + 1
                if isinstance(self.last[row], int):
                    tokens[row][here] = self.last[row]
        return torch.tensor(tokens, device=weights_BPV.device)


def _first(rng: Rng, probabilities: list[float], valid: list[bool], outcome: bool) -> int:
    for index, (probability, counts) in enumerate(zip(probabilities, valid, strict=True)):
        if counts and rng.bernoulli(probability) == outcome:
            return index
    return len(probabilities)


def draws_of(rngs: Sequence[Rng], most: int, device: torch.device) -> "SeededDraws | RowDraws":
    """Return the draws of these sources, of which every row makes at most `most`."""
    if all(type(rng) is SeededRng for rng in rngs):
        return SeededDraws(cast(Sequence[SeededRng], rngs), most, device)
    return RowDraws(rngs)
