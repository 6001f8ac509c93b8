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
    """What training minimises: a divergence, at a temperature, with a weight `decay ** k` for draft position k."""

    kind: str = "kl"
    temperature: float = 1.0
    position_decay: float = 0.8
    chunk_tokens: int = 512

    def __call__(
        self, unrolled: list[Unrolled], signals: TeacherSignals, lm_head: Callable[[Tensor], Tensor]
    ) -> AgreementSums:
        """Sum the weighted divergence over every unmasked (token, draft position)."""
        positions = [self._position(entry, signals, lm_head) for entry in unrolled]
        loss = sum(self.position_decay**k * sums[0].sum() for k, sums in enumerate(positions))
        alpha_K, match_K, count_K = (torch.stack([sums[i] for sums in positions]) for i in (1, 2, 3))
        return AgreementSums(loss, alpha_K, match_K, count_K)

    def _position(
        self, entry: Unrolled, signals: TeacherSignals, lm_head: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Summed divergence, overlap, argmax matches, and the count, of one draft position."""
        T = signals.mask_BT.shape[1]
        mask = signals.mask_BT[:, entry.offset :].flatten()
        student_ND = entry.hidden_BTD[:, : T - entry.offset].flatten(0, 1)[mask]
        teacher_NH = signals.hidden_BTH[:, entry.offset :].flatten(0, 1)[mask]
        divergence = student_ND.new_zeros((), dtype=torch.float32)
        alpha, match = divergence.detach().clone(), divergence.detach().clone()
        for start in range(0, student_ND.shape[0], self.chunk_tokens):
            chunk = slice(start, start + self.chunk_tokens)
            # Recomputed in the backward pass, so that no more than one chunk of [tokens, V] is ever alive.
            values = checkpoint(
                self._chunk, student_ND[chunk], teacher_NH[chunk], entry.head, lm_head, use_reentrant=False
            )
            divergence, alpha, match = divergence + values[0], alpha + values[1], match + values[2]
        if student_ND.shape[0] == 0:
            divergence = divergence + 0 * entry.hidden_BTD.sum()  # every process has to take part in the reduction
        return divergence, alpha, match, mask.sum()

    def _chunk(
        self,
        student_ND: Tensor,
        teacher_NH: Tensor,
        head: Callable[[Tensor], Tensor],
        lm_head: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            p_NV = at_least_float32(lm_head(teacher_NH)) / self.temperature
        q_NV = at_least_float32(head(student_ND)) / self.temperature
        divergence = DIVERGENCES[self.kind](p_NV, q_NV).sum()
        with torch.no_grad():
            alpha = overlap(p_NV, q_NV).sum()
            match = (p_NV.argmax(-1) == q_NV.argmax(-1)).sum().to(alpha.dtype)
        return divergence, alpha, match


def at_least_float32(logits: Tensor) -> Tensor:
    """Log-probabilities of half-precision logits are too coarse to sum; fp64 stays for the gradient tests."""
    return logits if logits.dtype == torch.float64 else logits.float()
