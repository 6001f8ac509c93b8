"""The outcome of a verification rule, on the device and for one sequence, and what remains of p after a rejection."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.decode.draws import NOT_DRAWN
from draftsmith.heads.draft_tree import ROOT
from draftsmith.heads.rows import constant

# Shapes: B sequences, D levels of the draft, V vocabulary.


@dataclass(frozen=True)
class VerifyResult:
    """The accepted path and the token after it."""

    path: tuple[int, ...]
    """Accepted nodes of the draft, starting with a child of the root."""
    next_token: int
    """The correction after a rejection, or the bonus token after the path's last token; `NOT_DRAWN` where the sequence
    ends with the path or the processors forbid every token."""
    overlap: tuple[float, ...]
    """For each tested draft position, in order: sum over v of min(p_v, q_v); for tokens that were not drawn from q, the
    target's probability of the candidates; 1.0 or 0.0 under greedy decoding."""

    @property
    def accepted(self) -> int:
        """Number of accepted draft tokens."""
        return len(self.path)

    def until(self, empty: Sequence[float]) -> "VerifyResult":
        """Return the result up to the first position on its path that is `empty`: no token is allowed after it."""
        for count, node in enumerate([ROOT, *self.path]):
            if empty[node + 1]:
                return self.first(count)
        return self

    def first(self, count: int) -> "VerifyResult":
        """Return the result of a sequence that ends with the first `count` tokens: nothing after them was tested."""
        if count > self.accepted:
            return self
        return VerifyResult(self.path[:count], NOT_DRAWN, self.overlap[:count])


@dataclass(frozen=True, eq=False)
class Decided:
    """The outcome of a rule on the device: accepted paths and the tokens after them."""

    path_BD: Tensor
    """Accepted nodes, then -1."""
    next_B: Tensor
    overlap_BD: Tensor
    """For each tested position, then NaN."""

    @property
    def columns(self) -> int:
        """Number of packed values of each sequence."""
        return 1 + 2 * self.path_BD.shape[1]

    def packed(self) -> Tensor:
        """Return the values [B, columns] in fp64 from which `result` is made."""
        return torch.cat([self.next_B[:, None], self.path_BD, self.overlap_BD.double()], 1)

    def result(self, values: Sequence[float]) -> VerifyResult:
        """Return the result for one sequence, from its packed values."""
        depth = self.path_BD.shape[1]
        path = (int(node) for node in values[1 : 1 + depth] if node >= 0)
        overlap = (value for value in values[1 + depth : self.columns] if value == value)
        return VerifyResult(tuple(path), int(values[0]), tuple(overlap))

    @staticmethod
    def together(parts: Sequence[tuple[list[int], "Decided"]]) -> "Decided":
        """Return the outcome of all sequences, from those of some of them with their rows."""
        if len(parts) == 1:
            return parts[0][1]
        B, D = sum(len(rows) for rows, _ in parts), max(part.path_BD.shape[1] for _, part in parts)
        first = parts[0][1]
        path_BD, next_B = first.path_BD.new_full((B, D), -1), first.next_B.new_empty(B)
        overlap_BD = first.overlap_BD.new_full((B, D), torch.nan)
        for rows, part in parts:
            rows_b, depth = constant(tuple(rows), next_B.device), part.path_BD.shape[1]
            path_BD[rows_b, :depth], next_B[rows_b] = part.path_BD, part.next_B
            overlap_BD[rows_b, :depth] = part.overlap_BD.to(overlap_BD.dtype)
        return Decided(path_BD, next_B, overlap_BD)


def residual(p_BV: Tensor, q_BV: Tensor, scale_B: Tensor | None = None) -> Tensor:
    """Return the unnormalised distributions after a rejection, max(scale * p - q, 0): [B, V].

    After a rejection a row is not zero, except through rounding where p and q differ in the last bit only. Then p, the
    limit of the residual, is returned.
    """
    scaled_BV = p_BV if scale_B is None else scale_B[:, None].to(p_BV.dtype) * p_BV
    rest_BV = (scaled_BV - q_BV).clamp_min_(0)
    return torch.where(rest_BV.any(-1, keepdim=True), rest_BV, p_BV)


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, with 0/0 = 1: a prefix of weight one without a residual is accepted."""
    return torch.where(whole > 0, part / whole, 1.0)
