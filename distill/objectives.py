"""What training minimises: weighted disagreement over all draft positions, summed chunk by chunk.

Everything returns sums over this process's tokens; the training loop alone divides, by the number of tokens of the
global batch, so that the loss depends on neither padding nor processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from draftsmith.distill.chunked import chunked_sums
from draftsmith.distill.divergences import (
    DIVERGENCES,
    cross_entropy,
    forward_kl,
    overlap,
    top_k_cross_entropy,
    total_variation,
)
from draftsmith.heads.drafter import TeacherSignals, Unrolled

# Shapes: N tokens, K draft positions, V vocabulary, D draft vocabulary or drafter hidden size, H target hidden size.

KINDS = (*DIVERGENCES, "ce", "lk_lambda", "accepted_length")
"""What a term of an objective may be; the recipe's schema names the same."""
LmHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AgreementSums:
    """Sums over this process's unmasked tokens; `loss` carries the gradient."""

    loss: Tensor
    """Scalar: sum over draft positions k of weight_k times the summed terms."""
    alpha_K: Tensor
    """Summed overlap by draft position."""
    match_K: Tensor
    """How often the two argmaxes agree, by draft position."""
    count_K: Tensor
    """Unmasked tokens by draft position."""


@dataclass
class _Position:
    """The unmasked tokens of one draft position."""

    entry: Unrolled
    student_ND: Tensor
    teacher_NH: Tensor
    anchors: tuple[Tensor, Tensor]
    """(row, column) of each token in the grid of anchors, by which the positions of one draft belong together."""
    grid: torch.Size


@dataclass(frozen=True)
class Objective:
    """A mix of terms, at one or several temperatures, with a weight for each draft position.

    kl, reverse_kl, js, tv, lk_alpha, ce   see `distill/divergences.py`
    lk_lambda         lambda KL + (1 - lambda) TV, lambda = exp(-eta alpha_k) with the last step's alpha of the position
                      (LK losses: arXiv:2602.23881)
    accepted_length   -(E[tau] - 1) = -sum_k prod_{i<=k} alpha_i over the positions of one draft
    """

    kind: str = "kl"
    mix: Mapping[str, float] = field(default_factory=dict)
    """Weights of several terms; then `kind` is not looked at."""
    temperatures: tuple[float, ...] = (1.0,)
    """Of both p and q; the terms are averaged over them. What is not a term, alpha among it, is at the first."""
    position_decay: float = 0.8
    position_weights: tuple[float, ...] = ()
    """Weight of each draft position; without any, position k weighs position_decay ** k."""
    beta: float = 0.5
    """Of js."""
    eta: float = 3.0
    """Of lk_lambda."""
    draft_length: int = 4
    """Of accepted_length and D-PACE, for drafters whose one state a position serves every depth."""
    dpace: float | None = None
    """a of D-PACE, which weighs a position by how much of the draft hangs on it; None for no such weights."""
    chunk_tokens: int = 512
    feature_weight: float = 0.0
    """Of EAGLE's regression: SmoothL1 between the drafter's state and the target's (arXiv:2401.15077, section 4)."""
    top_k: int = 10
    top_k_weight: float = 0.0
    """Of HASS's distillation on the target's likeliest tokens (arXiv:2408.15766, section 3.1)."""
    confidence_weight: float = 1.0
    """Of a confidence head's binary cross-entropy with alpha (DSpark, arXiv:2607.05147)."""

    @property
    def terms(self) -> dict[str, float]:
        """Weight of each kind of term."""
        return dict(self.mix) or {self.kind: 1.0}

    def __call__(
        self,
        unrolled: list[Unrolled],
        signals: TeacherSignals,
        lm_head: LmHead,
        last_alpha: Sequence[float] | None = None,
    ) -> AgreementSums:
        """Sum the weighted terms over every unmasked (token, draft position).

        `last_alpha`: each position's alpha over the last global batch, for lk_lambda; None before there is one.
        """
        positions = [_position(entry, signals) for entry in unrolled]
        extra = self._token_weights(positions, lm_head)
        sums = [
            self._sums(k, position, lm_head, extra[k], 0.0 if last_alpha is None else last_alpha[k])
            for k, position in enumerate(positions)
        ]
        loss = sum(values[0] for values in sums)
        alpha_K, match_K, count_K = (torch.stack([values[i] for values in sums]) for i in (1, 2, 3))
        return AgreementSums(loss, alpha_K, match_K, count_K)

    def _position_weight(self, k: int) -> float:
        if not self.position_weights:
            return self.position_decay**k
        return self.position_weights[min(k, len(self.position_weights) - 1)]

    def _sums(
        self, k: int, position: _Position, lm_head: LmHead, extra: "_TokenWeights", last_alpha: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weighted loss, overlap, argmax matches, and the count, of one draft position."""
        entry, student_ND, teacher_NH = position.entry, position.student_ND, position.teacher_NH
        count = torch.tensor(student_ND.shape[0], device=student_ND.device)
        if student_ND.shape[0] == 0:  # every process has to take part in the reduction
            zero = student_ND.new_zeros((), dtype=torch.float32)
            nothing = 0 * (entry.hidden_BTD.sum() + sum(parameter.sum() for parameter in entry.parameters()))
            return nothing, zero, zero.clone(), count

        def chunk(part_nD: Tensor, place: slice) -> tuple[Tensor, Tensor, Tensor]:
            weights = _TokenWeights(*(None if x is None else x[place] for x in (extra.dpace_N, extra.length_N)))
            return self._chunk(k, part_nD, teacher_NH[place], entry, lm_head, weights, last_alpha)

        loss, alpha, match = chunked_sums(chunk, student_ND, entry.parameters(), self.chunk_tokens)
        return loss + extra.constant, alpha, match, count

    def _chunk(
        self,
        k: int,
        student_ND: Tensor,
        teacher_NH: Tensor,
        entry: Unrolled,
        lm_head: LmHead,
        extra: "_TokenWeights",
        last_alpha: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        p_NV, favourite_N, q_ND = _logits(student_ND, teacher_NH, entry, lm_head)
        loss_N = student_ND.new_zeros(student_ND.shape[0], dtype=q_ND.dtype)
        for temperature in self.temperatures:
            p_log_ND, q_log_ND = log_probabilities(p_NV, q_ND, entry.vocabulary_D, temperature)
            terms_N = self._terms(p_log_ND, q_log_ND, favourite_N, extra.length_N, last_alpha)
            loss_N = loss_N + terms_N / len(self.temperatures)
        p_log_ND, q_log_ND = log_probabilities(p_NV, q_ND, entry.vocabulary_D, self.temperatures[0])
        alpha_N = overlap(p_log_ND, q_log_ND).detach()
        if self.top_k_weight:
            loss_N = loss_N + self.top_k_weight * top_k_cross_entropy(p_log_ND, q_log_ND, self.top_k)
        if self.feature_weight and entry.regresses:
            teacher_ND = teacher_NH.to(student_ND.dtype)
            distance_ND = nn.functional.smooth_l1_loss(student_ND, teacher_ND, reduction="none")
            loss_N = loss_N + self.feature_weight * distance_ND.mean(-1)
        if entry.confidence is not None and self.confidence_weight:
            sure_N = at_least_float32(entry.confidence(student_ND))
            wanted_N = alpha_N.clamp(0, 1)
            loss_N = loss_N + self.confidence_weight * nn.functional.binary_cross_entropy_with_logits(
                sure_N, wanted_N, reduction="none"
            )
        if extra.dpace_N is not None:
            loss_N = loss_N * extra.dpace_N
        loss = self._position_weight(k) * loss_N.sum()
        if extra.length_N is not None:  # no decay: the length itself says how much a position matters
            loss = loss - self.terms["accepted_length"] * (extra.length_N * overlap(p_log_ND, q_log_ND)).sum()
        with torch.no_grad():
            best_N = q_ND.argmax(-1)
            match = (favourite_N == best_N).sum().to(alpha_N.dtype)
        return loss, alpha_N.sum(), match

    def _terms(
        self, p_log_ND: Tensor, q_log_ND: Tensor, favourite_N: Tensor, length_N: Tensor | None, last_alpha: float
    ) -> Tensor:
        """[N]: the mix, but for accepted_length, which is no sum over tokens."""
        total_N = q_log_ND.new_zeros(q_log_ND.shape[0])
        for kind, weight in self.terms.items():
            if kind == "ce":
                total_N = total_N + weight * cross_entropy(favourite_N, q_log_ND)
            elif kind == "js":
                total_N = total_N + weight * DIVERGENCES[kind](p_log_ND, q_log_ND, self.beta)
            elif kind == "lk_lambda":
                share = math.exp(-self.eta * last_alpha)
                mixed_N = share * forward_kl(p_log_ND, q_log_ND) + (1 - share) * total_variation(p_log_ND, q_log_ND)
                total_N = total_N + weight * mixed_N
            elif kind != "accepted_length":
                total_N = total_N + weight * DIVERGENCES[kind](p_log_ND, q_log_ND)
        return total_N

    # Weights that depend on the other positions of the same draft: a first pass without gradient.

    def _token_weights(self, positions: list[_Position], lm_head: LmHead) -> list["_TokenWeights"]:
        wants_length = "accepted_length" in self.terms
        if not wants_length and self.dpace is None:
            return [_TokenWeights() for _ in positions]
        alphas, likelihoods = zip(*(self._agreement(position, lm_head) for position in positions), strict=True)
        weights = [_TokenWeights() for _ in positions]
        if wants_length:
            grids, constants = self._per_draft(positions, list(alphas), _length_weights)
            for weight, position, grid, constant in zip(weights, positions, grids, constants, strict=True):
                weight.length_N = grid[position.anchors]
                weight.constant = self.terms["accepted_length"] * constant
        if self.dpace is not None:
            smoothed = [(1 - self.dpace) * likelihood_N + self.dpace for likelihood_N in likelihoods]
            grids, _ = self._per_draft(positions, smoothed, _dpace_weights)
            for weight, position, grid in zip(weights, positions, grids, strict=True):
                weight.dpace_N = grid[position.anchors]
        return weights

    @torch.no_grad()
    def _agreement(self, position: _Position, lm_head: LmHead) -> tuple[Tensor, Tensor]:
        """(alpha [N], q of the target's favourite [N]) of one position's tokens."""
        alphas, likelihoods = [], []
        for start in range(0, position.student_ND.shape[0], self.chunk_tokens):
            place = slice(start, start + self.chunk_tokens)
            student_ND, teacher_NH = position.student_ND[place], position.teacher_NH[place]
            p_NV, favourite_N, q_ND = _logits(student_ND, teacher_NH, position.entry, lm_head)
            p_log_ND, q_log_ND = log_probabilities(p_NV, q_ND, position.entry.vocabulary_D, self.temperatures[0])
            alphas.append(overlap(p_log_ND, q_log_ND))
            likelihoods.append(torch.where(favourite_N >= 0, (-cross_entropy(favourite_N, q_log_ND)).exp(), 0.0))
        none = position.student_ND.new_zeros(0, dtype=torch.float32)
        return (torch.cat(alphas), torch.cat(likelihoods)) if alphas else (none, none)

    def _per_draft(
        self, positions: list[_Position], values: list[Tensor], weigh: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Lay values out as [K, B, T] by anchor, weigh them, and bring the weights back to each position's grid."""
        grids = []
        for position, value_N in zip(positions, values, strict=True):
            grid = value_N.new_zeros(position.grid)
            grid[position.anchors] = value_N
            grids.append(grid)
        if len(positions) > 1 or positions[0].entry.offset or positions[0].entry.places_BT is not None:
            weights, constant = weigh(torch.stack(grids))
            return list(weights), [constant, *[torch.zeros_like(constant)] * (len(positions) - 1)]
        # One state a position for every depth: the draft behind anchor t has its k-th token at t + k.
        (grid,), length = grids, self.draft_length
        drafts = torch.stack([nn.functional.pad(grid[:, k:], (0, min(k, grid.shape[1]))) for k in range(length)])
        weights, constant = weigh(drafts)
        back = sum(nn.functional.pad(weights[k], (k, 0))[:, : grid.shape[1]] for k in range(min(length, grid.shape[1])))
        return [back], [constant]


@dataclass
class _TokenWeights:
    """Of one draft position's tokens, detached."""

    dpace_N: Tensor | None = None
    length_N: Tensor | None = None
    """Derivative of the expected accepted length by the token's alpha."""
    constant: Tensor | float = 0.0
    """What makes the surrogate's value that of the expected length."""


def _length_weights(alpha_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """d/d alpha_i of sum_k prod_{j<=k} alpha_j, and what is missing from -sum_i w_i alpha_i to minus that sum."""
    K = alpha_KBT.shape[0]
    before = torch.cat([torch.ones_like(alpha_KBT[:1]), alpha_KBT[:-1].cumprod(0)])
    after = [torch.ones_like(alpha_KBT[0])]
    for k in range(K - 1, 0, -1):
        after.append(1 + alpha_KBT[k] * after[-1])
    weights = before * torch.stack(after[::-1])
    value = alpha_KBT.cumprod(0).sum()
    return weights, (weights * alpha_KBT).sum() - value


def _dpace_weights(sure_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """weight_k = sum_{j>=k} prod_{i<=j} s_i (D-PACE): how much accepted text hangs on position k."""
    survival = sure_KBT.cumprod(0)
    return survival.flip(0).cumsum(0).flip(0), survival.new_zeros(())


def _position(entry: Unrolled, signals: TeacherSignals) -> _Position:
    """The drafter's states and the target's that they are to agree with, unmasked ones alone."""
    if entry.places_BT is None:
        T = signals.mask_BT.shape[1]
        mask_BT = signals.mask_BT[:, entry.offset :]
        states_BTD = entry.hidden_BTD[:, : T - entry.offset]
        teacher_NH = signals.hidden_BTH[:, entry.offset :][mask_BT]
        return _Position(entry, states_BTD[mask_BT], teacher_NH, mask_BT.nonzero(as_tuple=True), signals.mask_BT.shape)
    places_BT = entry.places_BT.clamp_min(0)
    mask_BT = signals.mask_BT.gather(1, places_BT) & (entry.places_BT >= 0)
    rows_B1 = torch.arange(places_BT.shape[0], device=places_BT.device)[:, None]
    teacher_NH = signals.hidden_BTH[rows_B1, places_BT][mask_BT]
    return _Position(entry, entry.hidden_BTD[mask_BT], teacher_NH, mask_BT.nonzero(as_tuple=True), mask_BT.shape)


def _logits(student_ND: Tensor, teacher_NH: Tensor, entry: Unrolled, lm_head: LmHead) -> tuple[Tensor, Tensor, Tensor]:
    """(the target's logits [N, V], its favourite as a row of the draft vocabulary [N], the drafter's logits [N, D])."""
    with torch.no_grad():
        p_NV = at_least_float32(lm_head(teacher_NH))
        favourite_N = p_NV.argmax(-1)
        if entry.vocabulary_D is not None:
            rows_V = torch.full((p_NV.shape[-1],), -1, device=p_NV.device)
            rows_V[entry.vocabulary_D] = torch.arange(entry.vocabulary_D.shape[0], device=p_NV.device)
            favourite_N = rows_V[favourite_N]
    return p_NV, favourite_N, at_least_float32(entry.head(student_ND))


def log_probabilities(
    p_NV: Tensor, q_ND: Tensor, vocabulary_D: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Both rows over the drafter's vocabulary [N, D]; the target's as it is over the whole one."""
    with torch.no_grad():
        p_log_NV = (p_NV / temperature).log_softmax(-1)
        p_log_ND = p_log_NV if vocabulary_D is None else p_log_NV[:, vocabulary_D]
    return p_log_ND, (q_ND / temperature).log_softmax(-1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Log-probabilities of half-precision logits are too coarse to sum; fp64 stays for the gradient tests."""
    return logits if logits.dtype == torch.float64 else logits.float()
