"""The training objective: weighted disagreement over all draft positions, summed chunk by chunk.

All values are sums over this process's tokens. Only the training loop divides them, by the number of tokens in the
global batch, so that the loss depends neither on padding nor on the number of processes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.alignment import (
    LmHead,
    Position,
    Rows,
    TeacherOutput,
    at_least_float32,
    compare,
    draft_rows,
    position_of,
)
from draftsmith.distill.losses import (
    DIVERGENCES,
    chunked_sums,
    cross_entropy,
    forward_kl,
    jensen_shannon,
    overlap,
    top_k_cross_entropy,
    total_variation,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.base import DraftStates, TeacherSignals

# Shapes: N tokens, K draft positions, B texts, T positions, D draft vocabulary or drafter hidden size.

KINDS = (*DIVERGENCES, "ce", "label", "lk_lambda", "accepted_length")
"""Kinds of terms of an objective; the recipe's schema names the same."""


@dataclass(frozen=True)
class AgreementSums:
    """Sums over this process's unmasked tokens; `loss` carries the gradient."""

    loss: Tensor
    """Scalar: sum over draft positions k of weight_k times the summed terms."""
    alpha_K: Tensor
    """Summed overlap by draft position."""
    match_K: Tensor
    """Tokens at which both have the same argmax, by draft position."""
    count_K: Tensor
    """Unmasked tokens by draft position."""


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms, at one or several temperatures, with a weight for each draft position.

    kl, reverse_kl, js, tv, lk_alpha, ce   see `distill/losses.py`
    label             -log q of the text's next token, independent of the target
    lk_lambda         lambda KL + (1 - lambda) TV, lambda = exp(-eta alpha_k) with the last step's alpha of the position
                      (LK losses: arXiv:2602.23881)
    accepted_length   -(E[tau] - 1) = -sum_k prod_{i<=k} alpha_i over the positions of one draft

    With a teacher that knows only the most likely tokens, divergences are lower bounds and alpha is an upper bound, see
    `distill/alignment.py`; `ce` and `label` are exact.
    """

    kind: str = "kl"
    mix: Mapping[str, float] = field(default_factory=dict)
    """Weights of several terms; `kind` is then ignored."""
    temperatures: tuple[float, ...] = (1.0,)
    """Applied to both p and q; the terms are averaged over them. All other values, such as alpha, use the first."""
    position_decay: float = 0.8
    position_weights: tuple[float, ...] = ()
    """Weight of each draft position; if empty, position k has weight position_decay ** k."""
    beta: float = 0.5
    """Weight of p in the mixture of `js`."""
    eta: float = 3.0
    """Decay of the KL term with alpha in `lk_lambda`."""
    draft_length: int = 4
    """For accepted_length and D-PACE: draft positions of drafters whose states serve every depth."""
    dpace: float | None = None
    """a of D-PACE, which weights a position by the accepted text that depends on it; None: no such weights."""
    chunk_tokens: int = 512
    feature_weight: float = 0.0
    """Weight of EAGLE's regression: SmoothL1 between the drafter's state and the target's (arXiv:2401.15077, 4)."""
    top_k: int = 10
    top_k_weight: float = 0.0
    """Weight of HASS's distillation on the target's `top_k` most likely tokens (arXiv:2408.15766, section 3.1)."""
    confidence_weight: float = 1.0
    """Weight of a confidence head's binary cross-entropy with alpha (DSpark, arXiv:2607.05147)."""

    @property
    def terms(self) -> dict[str, float]:
        """Weight of each kind of term."""
        return dict(self.mix) or {self.kind: 1.0}

    def __call__(
        self,
        unrolled: list[DraftStates],
        signals: TeacherSignals,
        lm_head: LmHead,
        last_alpha: Sequence[float] | None = None,
    ) -> AgreementSums:
        """Return the weighted terms, summed over every unmasked (token, draft position).

        `last_alpha`: alpha of each position over the last global batch, for lk_lambda; None in the first step.
        """
        if signals.top_ids_BTE is not None:
            self.require_usable("logprobs")
        positions = [position_of(entry, signals) for entry in unrolled]
        extra = self._token_weights(positions, lm_head)
        sums = [
            self._sums(k, position, lm_head, extra[k], 0.0 if last_alpha is None else last_alpha[k])
            for k, position in enumerate(positions)
        ]
        return AgreementSums(
            sum((one.loss for one in sums[1:]), start=sums[0].loss),
            torch.stack([one.alpha for one in sums]),
            torch.stack([one.match for one in sums]),
            torch.stack([one.tokens for one in sums]),
        )

    def require_usable(self, teacher: str) -> None:
        """Check that a teacher of this kind (`teacher.kind`) provides what the terms need; else raise ConfigError."""
        if teacher != "logprobs":
            return
        temperature = next((value for value in self.temperatures if value != 1), 1.0)
        for key, value, expected in (
            ("temperature", temperature, "1, since the unknown tokens' probability is known at temperature 1 only"),
            ("top_k_weight", self.top_k_weight, "0, since the file may hold fewer tokens; 'kl' uses all that it holds"),
            ("feature_weight", self.feature_weight, "0, since the file holds no hidden states of the target"),
        ):
            if value != float(expected[0]):
                raise ConfigError(f"objective.{key}={value} with teacher.kind='logprobs'; expected {expected}")

    def _position_weight(self, k: int) -> float:
        if not self.position_weights:
            return self.position_decay**k
        return self.position_weights[min(k, len(self.position_weights) - 1)]

    def _sums(
        self, k: int, position: Position, lm_head: LmHead, extra: "_TokenWeights", last_alpha: float
    ) -> "_PositionSums":
        entry, student_ND = position.entry, position.student_ND
        count = torch.tensor(student_ND.shape[0], device=student_ND.device)

        def chunk(part_nD: Tensor, place: slice) -> tuple[Tensor, Tensor, Tensor]:
            known, labels_n = position.known.at(place), position.labels_N[place]
            return self._chunk(k, part_nD, known, labels_n, entry, lm_head, extra.at(place), last_alpha)

        loss, alpha, match = chunked_sums(chunk, student_ND, entry.parameters(), self.chunk_tokens)
        return _PositionSums(loss + extra.constant, alpha, match, count)

    def _chunk(
        self,
        k: int,
        student_ND: Tensor,
        known: TeacherOutput,
        labels_N: Tensor,
        entry: DraftStates,
        lm_head: LmHead,
        extra: "_TokenWeights",
        last_alpha: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compared = compare(student_ND, known, entry, lm_head)
        label_rows_N = draft_rows(labels_N, entry.vocabulary_D)
        loss_N = student_ND.new_zeros(student_ND.shape[0], dtype=compared.q_ND.dtype)
        first = compared.at(self.temperatures[0])
        for temperature in self.temperatures:
            rows = first if temperature == self.temperatures[0] else compared.at(temperature)
            terms_N = self._terms(rows, compared.target_argmax_N, label_rows_N, last_alpha)
            loss_N = loss_N + terms_N / len(self.temperatures)
        p_log_NE, q_log_NE = first.p_log_NE, first.q_log_NE
        with torch.no_grad():
            alpha_N = overlap(p_log_NE, q_log_NE)
        if self.top_k_weight:
            loss_N = loss_N + self.top_k_weight * top_k_cross_entropy(p_log_NE, q_log_NE, self.top_k)
        if self.feature_weight and entry.regresses:
            teacher_ND = known.hidden_NH.to(student_ND.dtype)
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
        if extra.length_N is not None:  # no decay: the accepted length itself weights the positions
            loss = loss - self.terms["accepted_length"] * (extra.length_N * overlap(p_log_NE, q_log_NE)).sum()
        with torch.no_grad():
            best_N = compared.q_ND.argmax(-1)
            match = (compared.target_argmax_N == best_N).sum().to(alpha_N.dtype)
        return loss, alpha_N.sum(), match

    def _terms(self, rows: Rows, target_argmax_N: Tensor, label_rows_N: Tensor, last_alpha: float) -> Tensor:
        """Return the weighted terms [N], without accepted_length, which is not a sum over tokens."""
        p_log_NE, q_log_NE, q_log_ND = rows
        total_N = q_log_ND.new_zeros(q_log_ND.shape[0])
        for kind, weight in self.terms.items():
            if kind == "ce":
                total_N = total_N + weight * cross_entropy(target_argmax_N, q_log_ND)
            elif kind == "label":
                total_N = total_N + weight * cross_entropy(label_rows_N, q_log_ND)
            elif kind == "js":
                total_N = total_N + weight * jensen_shannon(p_log_NE, q_log_NE, self.beta)
            elif kind == "lk_lambda":
                share = math.exp(-self.eta * last_alpha)
                mixed_N = share * forward_kl(p_log_NE, q_log_NE) + (1 - share) * total_variation(p_log_NE, q_log_NE)
                total_N = total_N + weight * mixed_N
            elif kind != "accepted_length":
                total_N = total_N + weight * DIVERGENCES[kind](p_log_NE, q_log_NE)
        return total_N

    # Weights that depend on the other positions of the same draft: a first pass without gradient.

    def _token_weights(self, positions: list[Position], lm_head: LmHead) -> list["_TokenWeights"]:
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
    def _agreement(self, position: Position, lm_head: LmHead) -> tuple[Tensor, Tensor]:
        """Return alpha [N] and q of the target's most likely token [N] at one draft position."""
        alphas, likelihoods = [], []
        for start in range(0, position.student_ND.shape[0], self.chunk_tokens):
            place = slice(start, start + self.chunk_tokens)
            compared = compare(position.student_ND[place], position.known.at(place), position.entry, lm_head)
            p_log_NE, q_log_NE, q_log_ND = compared.at(self.temperatures[0])
            alphas.append(overlap(p_log_NE, q_log_NE))
            target_argmax_N = compared.target_argmax_N
            likelihoods.append(
                torch.where(target_argmax_N >= 0, (-cross_entropy(target_argmax_N, q_log_ND)).exp(), 0.0)
            )
        none = position.student_ND.new_zeros(0, dtype=torch.float32)
        return (torch.cat(alphas), torch.cat(likelihoods)) if alphas else (none, none)

    def _per_draft(
        self, positions: list[Position], values: list[Tensor], weigh: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Lay values out as [K, B, T] by anchor, `weigh` them; return weights on each position's grid and constants."""
        grids = []
        for position, value_N in zip(positions, values, strict=True):
            grid = value_N.new_zeros(position.grid)
            grid[position.anchors] = value_N
            grids.append(grid)
        if len(positions) > 1 or positions[0].entry.offset or positions[0].entry.places_BT is not None:
            weights, constant = weigh(torch.stack(grids))
            return list(weights), [constant, *[torch.zeros_like(constant)] * (len(positions) - 1)]
        # One state a position serves every depth: token k of the draft after anchor t is at t + k.
        (grid,), length = grids, self.draft_length
        drafts = torch.stack([nn.functional.pad(grid[:, k:], (0, min(k, grid.shape[1]))) for k in range(length)])
        weights, constant = weigh(drafts)
        back = torch.zeros_like(grid)
        for k in range(min(length, grid.shape[1])):
            back = back + nn.functional.pad(weights[k], (k, 0))[:, : grid.shape[1]]
        return [back], [constant]


class _PositionSums(NamedTuple):
    """Sums over the tokens of one draft position; `loss` is weighted, `match` counts equal argmaxes."""

    loss: Tensor
    alpha: Tensor
    match: Tensor
    tokens: Tensor


@dataclass
class _TokenWeights:
    """Weights of one draft position's tokens, detached."""

    dpace_N: Tensor | None = None
    length_N: Tensor | None = None
    """Derivative of the expected accepted length with respect to the token's alpha."""
    constant: Tensor | float = 0.0
    """Makes the value of the surrogate loss that of the expected length."""

    def at(self, place: slice) -> "_TokenWeights":
        """Return the weights of a part of the tokens; the constant belongs to all of them together."""
        dpace_N, length_N = (
            None if weights_N is None else weights_N[place] for weights_N in (self.dpace_N, self.length_N)
        )
        return _TokenWeights(dpace_N, length_N)


def _length_weights(alpha_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """Return w_i = d/d alpha_i of sum_k prod_{j<=k} alpha_j, and minus that sum plus sum_i w_i alpha_i."""
    K = alpha_KBT.shape[0]
    before = torch.cat([torch.ones_like(alpha_KBT[:1]), alpha_KBT[:-1].cumprod(0)])
    after = [torch.ones_like(alpha_KBT[0])]
    for k in range(K - 1, 0, -1):
        after.append(1 + alpha_KBT[k] * after[-1])
    weights = before * torch.stack(after[::-1])
    value = alpha_KBT.cumprod(0).sum()
    return weights, (weights * alpha_KBT).sum() - value


def _dpace_weights(sure_KBT: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight_k = sum_{j>=k} prod_{i<=j} s_i (D-PACE): the accepted tokens that depend on position k."""
    survival = sure_KBT.cumprod(0)
    return survival.flip(0).cumsum(0).flip(0), survival.new_zeros(())
