"""Target and drafter at the tokens of the draft positions, as rows of log-probabilities over the draft vocabulary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from draftsmith.heads.base import DraftStates, TeacherSignals

# Shapes: B texts, T positions, X = B * T, N tokens or positions, n tokens of a chunk, V vocabulary, D draft vocabulary
# or drafter hidden size, H target hidden size.

LmHead = Callable[[Tensor], Tensor]
ROWS = 64
"""See `logits_of`."""


@dataclass(frozen=True, eq=False)
class Position:
    """The unmasked tokens of one draft position, in the order of the target's positions."""

    entry: DraftStates
    student_ND: Tensor
    rows_N: Tensor
    """Row of each token among the target's trained positions, ascending and distinct."""
    states_N: Tensor
    """Index of each token among the entry's states."""


def align(unrolled: Sequence[DraftStates], signals: TeacherSignals) -> tuple[list[Position], Tensor]:
    """Return the unmasked tokens of every draft position, and the indices of the target's trained positions.

    These are the indices [N] in the flattened batch, ascending, that at least one draft position is trained towards.
    """
    chosen = [_trained(entry, signals.mask_BT) for entry in unrolled]
    taught_X = torch.zeros_like(signals.mask_BT).flatten()
    for _, places_N in chosen:
        taught_X[places_N] = True
    row_X = taught_X.cumsum(0) - 1
    positions = [
        Position(entry, entry.states_ND[states_N], row_X[places_N], states_N)
        for entry, (states_N, places_N) in zip(unrolled, chosen, strict=True)
    ]
    (places_N,) = taught_X.nonzero(as_tuple=True)
    return positions, places_N


def _trained(entry: DraftStates, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the trained states, and their positions in the flattened batch, ascending."""
    (states_N,) = entry.trained(mask_BT).nonzero(as_tuple=True)
    places_N, order_N = entry.places_N[states_N].sort()
    return states_N[order_N], places_N


class TargetRows(NamedTuple):
    """The target's probabilities and sums over them, which all draft positions share."""

    p_ND: Tensor
    mass_N: Tensor
    """M"""
    constant_N: Tensor
    """c"""
    whole: bool
    """Whether they are of the whole vocabulary, so that M = 1."""

    @classmethod
    def of(cls, p_log_ND: Tensor, *, whole: bool) -> "TargetRows":
        """Return the rows of log-probabilities, which are overwritten."""
        p_ND = p_log_ND.exp_()
        mass_N = p_ND.new_ones(len(p_ND)) if whole else p_ND.sum(-1)
        return cls(p_ND, mass_N, torch.xlogy(p_ND, p_ND).sum(-1) - torch.xlogy(mass_N, mass_N), whole)

    def at(self, rows_n: Tensor) -> "TargetRows":
        """Return some of the rows."""
        return TargetRows(self.p_ND[rows_n], self.mass_N[rows_n], self.constant_N[rows_n], self.whole)


class _ForwardKl(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_ND: Tensor, p: TargetRows, temperature: float) -> tuple[Tensor, Tensor]:
        tempered_ND = logits_ND if temperature == 1 else logits_ND / temperature
        q_log_ND = tempered_ND.log_softmax(-1, dtype=p.p_ND.dtype)
        with torch.autocast(logits_ND.device.type, enabled=False):  # which would round the product to half precision
            kl_N = p.constant_N - torch.bmm(p.p_ND[:, None], q_log_ND[:, :, None])[:, 0, 0]
        difference_ND = q_log_ND.exp_().sub_(p.p_ND)
        alpha_N = (1 + p.mass_N - torch.linalg.vector_norm(difference_ND, 1, dim=-1)) / 2
        ctx.mark_non_differentiable(alpha_N)
        if ctx.needs_input_grad[0]:
            if not p.whole:  # M q - p = M (q - p + (1 - 1 / M) p)
                least = torch.finfo(p.p_ND.dtype).tiny
                difference_ND.addcmul_(p.p_ND, (1 - 1 / p.mass_N.clamp_min(least))[:, None])
            ctx.dtype, ctx.difference_ND, ctx.scale_N = logits_ND.dtype, difference_ND, p.mass_N / temperature
        return kl_N, alpha_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient_ND = ctx.difference_ND.mul_((gradients[0] * ctx.scale_N)[:, None])
        ctx.difference_ND = None
        return gradient_ND.to(ctx.dtype), None, None


def forward_kl_and_alpha(logits_ND: Tensor, p: TargetRows, temperature: float) -> tuple[Tensor, Tensor]:
    """Return `losses.forward_kl` and `losses.overlap` [N] of the drafter's logits; alpha has no gradient.

    On a GPU, reading and writing rows of 128k values takes longer than the matrix product that gives them.
    Differentiated term by term, forward KL and alpha read or write [N, D] 29 times; p is constant, so 13 times do:

        KL = c - sum_v p_v log q_v,  c = sum_v p_v log p_v - M log M    d KL / d logits_v = (M q_v - p_v) / temperature
        alpha = (1 + M - sum_v |q_v - p_v|) / 2

    with M = sum_v p_v, which is less than 1 if the drafter knows only a part of the vocabulary.

    Args:
        logits_ND: of any floating dtype; sums are in that of `p`.
        temperature: that `p` has been computed at; the logits are divided by it.
    """
    return _ForwardKl.apply(logits_ND, p, temperature)


@dataclass(frozen=True, eq=False)
class TargetChunk:
    """The target at N positions: its logits are computed once, for all draft positions."""

    hidden_NH: Tensor
    labels_N: Tensor
    """The text's next token as a row of the drafter's vocabulary; -1 if there is none, or it is not in there."""
    argmax_N: Tensor
    """The target's most likely token as such a row."""
    p: TargetRows | None
    """What `forward_kl_and_alpha` needs; None with `p_log_ND`."""
    p_log_ND: Tensor | None
    """Log-probabilities, not renormalised: over a part of the vocabulary the probabilities do not add up to 1."""

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        signals: TeacherSignals,
        places_N: Tensor,
        lm_head: LmHead,
        temperature: float,
        vocabulary_D: Tensor | None,
        *,
        draft_head: LmHead | None = None,
        fused: bool = False,
    ) -> Self:
        """Return the target at some positions of the flattened batch.

        Args:
            temperature: of p.
            vocabulary_D: see `DraftStates`.
            draft_head: the rows of `lm_head` for these tokens, which suffice where the signals have `log_sum_BT`.
            fused: keep what `forward_kl_and_alpha` needs instead of log-probabilities.
        """
        hidden_NH = signals.hidden_BTH.flatten(0, 1)[places_N]
        if draft_head is not None and signals.log_sum_BT is not None and signals.argmax_BT is not None:
            argmax_N, log_sum_N = signals.argmax_BT.flatten()[places_N], signals.log_sum_BT.flatten()[places_N]
            p_log_ND = at_least_float32(logits_of(draft_head, hidden_NH))
            p_log_ND = p_log_ND - log_sum_N[:, None].to(p_log_ND.dtype)
        else:
            p_NV = at_least_float32(logits_of(lm_head, hidden_NH))
            argmax_N = p_NV.argmax(-1)
            p_log_NV = tempered(p_NV, temperature).log_softmax(-1)
            p_log_ND = p_log_NV if vocabulary_D is None else p_log_NV[:, vocabulary_D]
        labels_N, argmax_N = (draft_rows(ids, vocabulary_D) for ids in (_next_tokens(signals, places_N), argmax_N))
        p = TargetRows.of(p_log_ND, whole=vocabulary_D is None) if fused else None
        return cls(hidden_NH, labels_N, argmax_N, p, None if fused else p_log_ND)

    def at(self, rows_n: Tensor) -> "TargetChunk":
        """Return the target at some of the positions; `rows_n`: ascending and distinct."""
        if rows_n.shape == self.argmax_N.shape:  # all, in order
            return self
        p = None if self.p is None else self.p.at(rows_n)
        p_log_nD = None if self.p_log_ND is None else self.p_log_ND[rows_n]
        return TargetChunk(self.hidden_NH[rows_n], self.labels_N[rows_n], self.argmax_N[rows_n], p, p_log_nD)


def _next_tokens(signals: TeacherSignals, places_N: Tensor) -> Tensor:
    """Return the text's token after each place of the flattened batch; -1 if there is none."""
    next_BT = signals.input_ids_BT.where(signals.attention_mask_BT.bool(), -1)[:, 1:]
    return nn.functional.pad(next_BT, (0, 1), value=-1).flatten()[places_N]


def logits_of(head: LmHead, states_NH: Tensor) -> Tensor:
    """Return the logits [N, V] of N states.

    In bf16 on a CPU they are computed for a multiple of `ROWS` states: oneDNN keeps a kernel of a megabyte for each
    number of rows that occurs, and the last chunk of each batch would have its own.
    """
    in_bf16 = states_NH.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
    filling = -len(states_NH) % ROWS if states_NH.device.type == "cpu" and in_bf16 else 0
    return head(nn.functional.pad(states_NH, (0, 0, 0, filling)))[: len(states_NH)] if filling else head(states_NH)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature; at 1 return them without a copy."""
    return logits if temperature == 1 else logits / temperature


def draft_rows(ids: Tensor, vocabulary_D: Tensor | None) -> Tensor:
    """Return the row of each token in the drafter's vocabulary; -1 if it has none, and for -1."""
    if vocabulary_D is None:
        return ids
    sorted_D, order_D = vocabulary_D.sort()
    indices = torch.searchsorted(sorted_D, ids).clamp_max(len(vocabulary_D) - 1)
    return order_D[indices].where(sorted_D[indices] == ids, -1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Convert half-precision logits to float32, in which log-probabilities are exact enough to sum; keep float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
