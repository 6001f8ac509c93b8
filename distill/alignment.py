"""Target and drafter at the tokens of one draft position, as rows of log-probabilities of the same events.

If the target's hidden states are known, the events are the tokens of the drafter's vocabulary. If a file holds only the
target's most likely tokens, the events are these and a tail, 'any other token'. Merging events hides differences inside
the tail: by the data-processing inequality every divergence is then a lower bound of the full one, and alpha an upper
bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftStates, TeacherSignals

# Shapes: B texts, T positions, N tokens, V vocabulary, D draft vocabulary or drafter hidden size, H target hidden size,
# E events or known tokens.

LmHead = Callable[[Tensor], Tensor]
NOTHING = -1e30
"""Log-probability of an impossible event; finite, so that the difference of two of them is zero and not nan."""
LEAST_TAIL = torch.finfo(torch.float32).eps
"""Probability of the tail if those of the known tokens add up to 1 within rounding."""


class TopTokens(NamedTuple):
    """The tokens of each position whose log-probability is known."""

    ids_NE: Tensor
    """-1 for none."""
    log_NE: Tensor


@dataclass(frozen=True)
class TeacherOutput:
    """The target at N positions: its final hidden states, or only its most likely tokens."""

    hidden_NH: Tensor
    """[N, 0] if `top` is given."""
    top: TopTokens | None = None

    def at(self, place: slice) -> "TeacherOutput":
        """Return the output at a part of the positions."""
        top = None if self.top is None else TopTokens(*(part[place] for part in self.top))
        return TeacherOutput(self.hidden_NH[place], top)


@dataclass(frozen=True)
class Position:
    """The unmasked tokens of one draft position."""

    entry: DraftStates
    student_ND: Tensor
    known: TeacherOutput
    labels_N: Tensor
    """The text's next token, -1 if there is none."""
    anchors: tuple[Tensor, ...]
    """(row, column) of each token in the grid of anchors; the positions of one draft have the same anchor."""
    grid: torch.Size


def position_of(entry: DraftStates, signals: TeacherSignals) -> Position:
    """Select the unmasked states of one draft position, and the target's outputs that they should agree with."""
    if entry.places_BT is None:
        width = max(0, signals.mask_BT.shape[1] - entry.offset)
        mask_BT = signals.mask_BT[:, entry.offset :]
        if signals.documents_BT is not None:
            documents_BT = signals.documents_BT
            mask_BT = mask_BT & (documents_BT[:, :width] == documents_BT[:, entry.offset :])
        states_BTD = entry.hidden_BTD[:, :width]
        known, labels_N = _taught(signals, lambda x_BT: x_BT[:, entry.offset :][mask_BT])
        anchors = mask_BT.nonzero(as_tuple=True)
        return Position(entry, states_BTD[mask_BT], known, labels_N, anchors, signals.mask_BT.shape)
    places_BT = entry.places_BT.clamp_min(0)
    mask_BT = signals.mask_BT.gather(1, places_BT) & (entry.places_BT >= 0)
    rows_B1 = torch.arange(places_BT.shape[0], device=places_BT.device)[:, None]
    known, labels_N = _taught(signals, lambda x_BT: x_BT[rows_B1, places_BT][mask_BT])
    anchors = mask_BT.nonzero(as_tuple=True)
    return Position(entry, entry.hidden_BTD[mask_BT], known, labels_N, anchors, mask_BT.shape)


def _taught(signals: TeacherSignals, pick: Callable[[Tensor], Tensor]) -> tuple[TeacherOutput, Tensor]:
    """Return the target's outputs and the text's next tokens at the positions that `pick` selects from [B, T, ...]."""
    next_BT = signals.input_ids_BT.where(signals.attention_mask_BT.bool(), -1)[:, 1:]
    labels_BT = nn.functional.pad(next_BT, (0, 1), value=-1)
    top = None
    if signals.top_ids_BTE is not None and signals.top_log_BTE is not None:
        top = TopTokens(pick(signals.top_ids_BTE), pick(signals.top_log_BTE))
    return TeacherOutput(pick(signals.hidden_BTH), top), pick(labels_BT)


class Rows(NamedTuple):
    """Log-probabilities at one temperature."""

    p_log_NE: Tensor
    """The target's, not renormalised: over a part of the vocabulary the probabilities do not add up to 1."""
    q_log_NE: Tensor
    """The drafter's, for the same events."""
    q_log_ND: Tensor
    """The drafter's, for its whole vocabulary."""


@dataclass(frozen=True)
class Compared:
    """Target and drafter at N positions, before a temperature is applied."""

    target_argmax_N: Tensor
    """The target's most likely token as a row of the drafter's vocabulary; -1 if it is not in there."""
    p_NV: Tensor | None
    """The target's logits; None if only the `top` tokens are known."""
    q_ND: Tensor
    """The drafter's logits."""
    top: TopTokens | None
    vocabulary_D: Tensor | None

    def at(self, temperature: float) -> Rows:
        """Return the rows at a temperature, over the drafter's vocabulary or over the known tokens and the tail."""
        q_log_ND = _tempered(self.q_ND, temperature).log_softmax(-1)
        if self.top is not None:
            assert temperature == 1, "the probability of the tail is known at temperature 1 only"
            return Rows(*known_and_tail(self.top, q_log_ND, self.vocabulary_D), q_log_ND)
        assert self.p_NV is not None
        with torch.no_grad():
            p_log_NV = _tempered(self.p_NV, temperature).log_softmax(-1)
            p_log_ND = p_log_NV if self.vocabulary_D is None else p_log_NV[:, self.vocabulary_D]
        return Rows(p_log_ND, q_log_ND, q_log_ND)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature; at 1 return them without a copy."""
    return logits if temperature == 1 else logits / temperature


def compare(student_ND: Tensor, known: TeacherOutput, entry: DraftStates, lm_head: LmHead) -> Compared:
    """Compute the logits of target and drafter at the same tokens."""
    p_NV = None
    with torch.no_grad():
        if known.top is None:
            p_NV = at_least_float32(lm_head(known.hidden_NH))
            target_argmax_N = p_NV.argmax(-1)
        else:
            best_N1 = known.top.log_NE.where(known.top.ids_NE >= 0, -torch.inf).argmax(-1, keepdim=True)
            target_argmax_N = known.top.ids_NE.gather(-1, best_N1)[:, 0]
        target_argmax_N = draft_rows(target_argmax_N, entry.vocabulary_D)
    return Compared(target_argmax_N, p_NV, at_least_float32(entry.head(student_ND)), known.top, entry.vocabulary_D)


def known_and_tail(top: TopTokens, q_log_ND: Tensor, vocabulary_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (p, q) as log-probabilities [N, E + 1] of the known tokens and, last, of any other token.

    p of the tail is the probability that the known tokens leave, q of the tail the sum over the drafter's other tokens.
    Known tokens that are not in the drafter's vocabulary are no events: their probability is missing from p.
    """
    N, D = q_log_ND.shape
    with torch.no_grad():
        top_log_NE = at_least_float32(top.log_NE).where(top.ids_NE >= 0, -torch.inf)
        rows_NE = draft_rows(top.ids_NE, vocabulary_D)
        event_NE = (rows_NE >= 0) & (top_log_NE > NOTHING)
        # Column D takes the entries that are no events.
        merged_ND = torch.ones(N, D + 1, dtype=torch.bool, device=q_log_ND.device)
        merged_ND = merged_ND.scatter(-1, rows_NE.where(event_NE, D), False)[:, :D]
        tail_N1 = -torch.expm1(top_log_NE.logsumexp(-1, keepdim=True))
        tail_N1 = tail_N1.clamp_min(LEAST_TAIL).log().where(merged_ND.any(-1, keepdim=True), NOTHING)
        p_log_NE = torch.cat([top_log_NE.where(event_NE, NOTHING), tail_N1], -1).to(q_log_ND.dtype)
    # A sum over the other tokens: 1 minus the known ones would lose all digits of a small tail.
    q_tail_N1 = q_log_ND.masked_fill(~merged_ND, NOTHING).logsumexp(-1, keepdim=True)
    q_known_NE = q_log_ND.gather(-1, rows_NE.clamp_min(0)).where(event_NE, NOTHING)
    return p_log_NE, torch.cat([q_known_NE, q_tail_N1], -1)


def draft_rows(ids: Tensor, vocabulary_D: Tensor | None) -> Tensor:
    """Return the row of each token in the drafter's vocabulary; -1 if it has none, and for -1."""
    if vocabulary_D is None:
        return ids
    sorted_D, order_D = vocabulary_D.sort()
    places = torch.searchsorted(sorted_D, ids).clamp_max(len(vocabulary_D) - 1)
    return order_D[places].where(sorted_D[places] == ids, -1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32, in which log-probabilities are exact enough to sum; keep float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
