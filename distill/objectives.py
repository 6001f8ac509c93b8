"""Agreement objectives: per-position divergences between target and drafter, summed chunk by chunk.

Everything returns sums; the training loop alone divides, by the number of tokens of the global batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.heads.drafter import TeacherSignals, Unrolled

# Shapes: N tokens, K draft positions, V vocabulary, D drafter hidden size, H target hidden size.


def forward_kl(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """KL(p || q) in nats per token [N] (DistillSpec: Zhou et al. 2023, arXiv:2310.08461)."""
    p_log_NV, q_log_NV = p_logits_NV.log_softmax(-1), q_logits_NV.log_softmax(-1)
    return (p_log_NV.exp() * (p_log_NV - q_log_NV)).sum(-1)


def total_variation(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """TV(p, q) = 1 - sum_v min(p_v, q_v) per token [N]: the chance of a rejection.

    Leviathan et al. 2023, arXiv:2211.17192, Corollary 3.6. Its gradient all but vanishes from a random start.
    """
    return 1 - overlap(p_logits_NV, q_logits_NV)


def cross_entropy(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """-log q of the target's likeliest token, per token [N]: agreement under greedy decoding."""
    return torch.nn.functional.cross_entropy(q_logits_NV, p_logits_NV.argmax(-1), reduction="none")


def overlap(p_logits_NV: Tensor, q_logits_NV: Tensor) -> Tensor:
    """Probability that the target accepts a token drawn from the drafter, per token [N].

    alpha = sum_v min(p_v, q_v)   (Leviathan et al. 2023, arXiv:2211.17192, Corollary 3.6)
    """
    return torch.minimum(p_logits_NV.softmax(-1), q_logits_NV.softmax(-1)).sum(-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "tv": total_variation,
    "ce": cross_entropy,
}


@dataclass(frozen=True)
class AgreementSums:
    """Sums over this process's unmasked tokens; `loss` carries the gradient."""

    loss: Tensor
    """Scalar: sum over draft positions k of weight_k times the summed divergence."""
    alpha_K: Tensor
    """Summed overlap by draft position."""
    match_K: Tensor
    """How often the two argmaxes agree, by draft position."""
    count_K: Tensor
    """Unmasked tokens by draft position."""


@dataclass(frozen=True)
class Objective:
    """What training minimises: a divergence, at a temperature, with a weight `decay ** k` for draft position k.

    A drafter with a draft vocabulary is compared with the target's distribution as it is, so that what the vocabulary
    lacks counts as a miss in every metric: alpha sums min(p, q) over the draft vocabulary with the whole p, and the
    divergences weigh a token by the target's mass inside it.
    """

    kind: str = "kl"
    temperature: float = 1.0
    position_decay: float = 0.8
    chunk_tokens: int = 512
    feature_weight: float = 0.0
    """Of EAGLE's regression: SmoothL1 between the drafter's state and the target's (arXiv:2401.15077, section 4)."""
    top_k: int = 10
    top_k_weight: float = 0.0
    """Of HASS's distillation on the target's likeliest tokens (arXiv:2408.15766, section 3.1)."""
    confidence_weight: float = 1.0
    """Of a confidence head's binary cross-entropy with 1 - TV (DSpark, arXiv:2607.05147)."""

    def __call__(
        self, unrolled: list[Unrolled], signals: TeacherSignals, lm_head: Callable[[Tensor], Tensor]
    ) -> AgreementSums:
        """Sum the weighted divergence over every unmasked (token, draft position)."""
        positions = [self._position(entry, signals, lm_head) for entry in unrolled]
        loss = sum(self.position_decay**k * sums[0] for k, sums in enumerate(positions))
        alpha_K, match_K, count_K = (torch.stack([sums[i] for sums in positions]) for i in (1, 2, 3))
        return AgreementSums(loss, alpha_K, match_K, count_K)

    def _position(
        self, entry: Unrolled, signals: TeacherSignals, lm_head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Summed loss, overlap, argmax matches, and the count, of one draft position."""
        student_ND, teacher_NH = _pairs(entry, signals)
        loss = student_ND.new_zeros((), dtype=torch.float32)
        alpha, match = loss.detach().clone(), loss.detach().clone()
        for start in range(0, student_ND.shape[0], self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            # Recomputed in the backward pass, so that no more than one chunk of [tokens, V] is ever alive.
            values = checkpoint(self._chunk, student_ND[chunk], teacher_NH[chunk], entry, lm_head, use_reentrant=False)
            loss, alpha, match = loss + values[0], alpha + values[1], match + values[2]
        if student_ND.shape[0] == 0:
            loss = loss + 0 * entry.hidden_BTD.sum()  # every process has to take part in the reduction
        return loss, alpha, match, torch.tensor(student_ND.shape[0], device=loss.device)

    def _chunk(
        self, student_ND: Tensor, teacher_NH: Tensor, entry: Unrolled, lm_head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            p_NV = at_least_float32(lm_head(teacher_NH)) / self.temperature
        q_ND = at_least_float32(entry.head(student_ND)) / self.temperature
        p_ND, mass_N = restricted(p_NV, entry.vocabulary_D)
        loss = self._divergence(p_NV, p_ND, mass_N, q_ND, entry.vocabulary_D).sum()
        if self.top_k_weight:
            loss = loss + self.top_k_weight * (mass_N * top_k_cross_entropy(p_ND, q_ND, self.top_k)).sum()
        if self.feature_weight and entry.regresses:
            teacher_ND = teacher_NH.to(student_ND.dtype)
            distance_N = torch.nn.functional.smooth_l1_loss(student_ND, teacher_ND, reduction="none").mean(-1)
            loss = loss + self.feature_weight * distance_N.sum()
        alpha_N = torch.minimum(p_ND.softmax(-1) * mass_N[:, None], q_ND.softmax(-1)).sum(-1)
        if entry.confidence is not None and self.confidence_weight:
            sure_N = at_least_float32(entry.confidence(student_ND))
            wanted_N = alpha_N.detach().clamp(0, 1)
            loss = loss + self.confidence_weight * torch.nn.functional.binary_cross_entropy_with_logits(
                sure_N, wanted_N, reduction="sum"
            )
        with torch.no_grad():
            guess_N = q_ND.argmax(-1) if entry.vocabulary_D is None else entry.vocabulary_D[q_ND.argmax(-1)]
            match = (p_NV.argmax(-1) == guess_N).sum().to(alpha_N.dtype)
        return loss, alpha_N.detach().sum(), match

    def _divergence(
        self, p_NV: Tensor, p_ND: Tensor, mass_N: Tensor, q_ND: Tensor, vocabulary_D: Tensor | None
    ) -> Tensor:
        """[N], with the target's mass inside the draft vocabulary where that is not everything."""
        if vocabulary_D is None:
            return DIVERGENCES[self.kind](p_NV, q_ND)
        if self.kind == "tv":
            return 1 - torch.minimum(p_ND.softmax(-1) * mass_N[:, None], q_ND.softmax(-1)).sum(-1)
        if self.kind == "ce":
            inside_N = p_NV.argmax(-1) == vocabulary_D[p_ND.argmax(-1)]
            return torch.where(inside_N, cross_entropy(p_ND, q_ND), 0.0)
        return mass_N * DIVERGENCES[self.kind](p_ND, q_ND)


def _pairs(entry: Unrolled, signals: TeacherSignals) -> tuple[Tensor, Tensor]:
    """The drafter's states [N, D] and the target's that they are to agree with [N, H], unmasked ones alone."""
    if entry.places_BT is None:
        T = signals.mask_BT.shape[1]
        mask = signals.mask_BT[:, entry.offset :].flatten()
        student_ND = entry.hidden_BTD[:, : T - entry.offset].flatten(0, 1)[mask]
        return student_ND, signals.hidden_BTH[:, entry.offset :].flatten(0, 1)[mask]
    places_BT = entry.places_BT.clamp_min(0)
    mask_BT = signals.mask_BT.gather(1, places_BT) & (entry.places_BT >= 0)
    rows_B1 = torch.arange(places_BT.shape[0], device=places_BT.device)[:, None]
    return entry.hidden_BTD[mask_BT], signals.hidden_BTH[rows_B1, places_BT][mask_BT]


def restricted(p_logits_NV: Tensor, vocabulary_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """The target's logits over a draft vocabulary [N, D], and its probability mass inside it [N]."""
    if vocabulary_D is None:
        return p_logits_NV, p_logits_NV.new_ones(p_logits_NV.shape[0])
    p_logits_ND = p_logits_NV[:, vocabulary_D]
    return p_logits_ND, (p_logits_ND.logsumexp(-1) - p_logits_NV.logsumexp(-1)).exp()


def top_k_cross_entropy(p_logits_NV: Tensor, q_logits_NV: Tensor, k: int) -> Tensor:
    """-sum over the target's k likeliest tokens of p log q, per token [N] (HASS, arXiv:2408.15766, section 3.1)."""
    best_NV = p_logits_NV.topk(min(k, p_logits_NV.shape[-1]))
    p_Nk = best_NV.values.sub(p_logits_NV.logsumexp(-1, keepdim=True)).exp()
    return -(p_Nk * q_logits_NV.log_softmax(-1).gather(-1, best_NV.indices)).sum(-1)


def at_least_float32(logits: Tensor) -> Tensor:
    """Log-probabilities of half-precision logits are too coarse to sum; fp64 stays for the gradient tests."""
    return logits if logits.dtype == torch.float64 else logits.float()
