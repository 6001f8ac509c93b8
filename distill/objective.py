"""The training objective: weighted disagreement over all draft positions, summed chunk by chunk.

All values are sums over this process's tokens. Only the training loop divides them, by the number of tokens in the
global batch, so that the loss depends neither on padding nor on the number of processes.

The logits of all tokens are never in memory at once: a part's gradient is computed with its loss. Recomputing parts in
the backward pass would save as much memory and cost another forward pass of both lm_heads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.draft_probabilities import (
    Aligned,
    Compared,
    LmHead,
    Position,
    TargetChunk,
    TeacherOutput,
    align,
    at_least_float32,
    draft_rows,
    forward_kl_and_alpha,
)
from draftsmith.distill.draft_weights import DraftWeights
from draftsmith.distill.losses import (
    ACCEPTED_LENGTH,
    LOSSES,
    LossInputs,
    overlap,
    top_k_cross_entropy,
)
from draftsmith.heads.base import DraftStates, TeacherSignals
from draftsmith.heads.lm_head import draft_rows_of

# Shapes: N tokens, n tokens of a chunk, K draft positions, D draft vocabulary or drafter hidden size.


class Part(NamedTuple):
    """Some tokens of one draft position, and their loss."""

    source: int
    """Index of the states that they belong to."""
    place: slice
    loss: Callable[[Tensor], Tensor]
    """Maps the states [n, D] to the summed loss."""


# Shapes: N tokens, n tokens of a part, D hidden size of the drafter.


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Iterable[Part], count: int, *tensors: Tensor) -> Tensor:
        needed = ctx.needs_input_grad[2:]
        summed = {index: torch.zeros_like(tensor) for index, tensor in enumerate(tensors) if needed[index]}
        total = tensors[0].new_zeros((), dtype=torch.promote_types(tensors[0].dtype, torch.float32))
        for part in parts:
            total = total + _differentiate(part, count, tensors, summed)
            del part  # its logits of the target, before the next ones are computed
        ctx.gradients = [summed.get(index) for index in range(len(tensors))]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is as large as the head, and this is its only reference.
        scaled = [None if gradient is None else gradient.mul_(gradients[0]) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def _differentiate(part: Part, count: int, tensors: Sequence[Tensor], summed: dict[int, Tensor]) -> Tensor:
    """Return a part's loss, and add its gradients to `summed`; the first `count` tensors are states."""
    wanted = [index for index in summed if index >= count or index == part.source]
    with torch.enable_grad():
        states_nD = tensors[part.source][part.place].detach().requires_grad_(part.source in summed)
        loss = part.loss(states_nD)
        inputs = [states_nD if index == part.source else tensors[index] for index in wanted]
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
    for index, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None and index == part.source:
            summed[index][part.place] = gradient
        elif gradient is not None:
            summed[index] += gradient
    return loss.detach()


def summed_loss(parts: Iterable[Part], states: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the sum of the parts' losses; each part is made, differentiated and freed before the next one.

    There is one gradient for each tensor, however many draft positions share it. All states and parameters get a
    gradient, also without any part, so that all processes build the same graph: ZeRO-2 reduces gradients in the order
    in which each process computes them.

    Args:
        parts: made one after the other, without a gradient, while their sum is computed.
        states: of each source, [N, D].
        parameters: parameters that the losses read besides the states; those that are not listed get no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad and torch.is_grad_enabled()]
    return _SummedLoss.apply(parts, len(states), *states, *dict.fromkeys(trained))


@dataclass(frozen=True, eq=False)
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
    """A weighted sum of terms, with a weight for each draft position.

    kl, reverse_kl, js, tv, lk_alpha, lk_lambda, ce   see `LOSSES` in `distill/losses.py`
    label             -log q of the text's next token, independent of the target
    accepted_length   -(E[tau] - 1) = -sum_k prod_{i<=k} alpha_i over the positions of one draft
    """

    kind: str = "kl"
    mix: Mapping[str, float] = field(default_factory=dict)
    """Weights of several terms; `kind` is then ignored."""
    temperature: float = 1.0
    """Applied to both p and q."""
    position_decay: float = 0.8
    """Draft position k has the weight position_decay ** k."""
    draft_length: int = 4
    """For accepted_length: draft positions of drafters whose states serve every depth."""
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
        aligned = align(unrolled, signals)
        terms, weights = self.terms, None
        if ACCEPTED_LENGTH in terms:
            weights = DraftWeights(aligned.positions, self.draft_length, signals.mask_BT.shape[1])
        sums = _Sums.of(aligned)
        parts = self._parts(aligned, sums, weights, lm_head, last_alpha or [0.0] * len(unrolled))
        states = [position.student_ND for position in aligned.positions]
        loss = summed_loss(parts, states, [parameter for entry in unrolled for parameter in entry.parameters()])
        if weights is not None:
            loss = loss + terms[ACCEPTED_LENGTH] * weights.constant()
        return AgreementSums(loss, torch.stack(sums.alpha), torch.stack(sums.match), sums.count_K)

    def _parts(
        self,
        aligned: Aligned,
        sums: "_Sums",
        weights: DraftWeights | None,
        lm_head: LmHead,
        last_alpha: Sequence[float],
    ) -> Iterator[Part]:
        """Yield the tokens of each draft position for each chunk of the target's positions.

        A token's weight may depend on tokens of its draft in later chunks: those are compared first, without gradient.
        """
        size, vocabulary_D = self.chunk_tokens, aligned.positions[0].entry.vocabulary_D
        draft_head = self._draft_head(aligned.known, lm_head, vocabulary_D)
        ahead = 0 if weights is None else -(-(weights.longest - 1) // size)
        chunks = _chunks(aligned, size)
        waiting: deque[tuple[TargetChunk, list[_Tokens]]] = deque()
        for number in range(len(chunks) + ahead):
            if number < len(chunks):
                known, tokens = chunks[number]
                fused = self._is_plain_kl and weights is None
                target = TargetChunk(known, lm_head, self.temperature, vocabulary_D, draft_head=draft_head, fused=fused)
                if weights is not None:
                    self._record(weights, target, tokens)
                waiting.append((target, tokens))
                del target
            if number < ahead:
                continue
            if weights is not None:
                weights.update()
            for some in waiting[0][1]:
                weight_n = None if weights is None else weights.at(some.k, some.place)
                one = partial(self._loss, waiting[0][0], some, weight_n, last_alpha[some.k], sums)
                yield Part(some.k, some.place, one)
                del one
            waiting.popleft()

    def _draft_head(self, known: TeacherOutput, lm_head: LmHead, vocabulary_D: Tensor | None) -> LmHead | None:
        """Return the rows of the lm_head for the draft vocabulary, where they give p; else None."""
        if vocabulary_D is None or known.normalizers is None or self.temperature != 1:
            return None
        return draft_rows_of(lm_head, vocabulary_D)

    @property
    def _is_plain_kl(self) -> bool:
        """Whether nothing but forward KL at one temperature, and alpha, is computed from the probabilities."""
        return self.terms.keys() == {"kl"} and not self.top_k_weight

    def _record(self, weights: DraftWeights, target: TargetChunk, tokens: Sequence["_Tokens"]) -> None:
        """Record alpha of the tokens of a chunk; the weights follow from it."""
        for some in tokens:
            compared = target.compare(some.position.student_ND[some.place], some.rows_n, some.position.entry)
            weights.record(some.k, some.place, overlap(*compared.rows()))

    def _loss(
        self,
        target: TargetChunk,
        some: "_Tokens",
        weight_n: Tensor | None,
        last_alpha: float,
        sums: "_Sums",
        student_ND: Tensor,
    ) -> Tensor:
        """Return the summed loss of some tokens of a draft position, and add their agreement to `sums`.

        `weight_n`: see `DraftWeights`; None without the term accepted_length.
        """
        entry = some.position.entry
        compared = target.compare(student_ND, some.rows_n, entry)
        loss_N, alpha_N = self._compared(compared, weight_n is not None, last_alpha)
        if entry.base_head is not None:
            base = target.compare(student_ND, some.rows_n, replace(entry, head=entry.base_head))
            loss_N = loss_N + self._compared(base, False, last_alpha)[0]
        sums.add(some.k, alpha_N.detach(), compared)
        if self.feature_weight and entry.regresses:
            teacher_ND = compared.known.hidden_NH.to(student_ND.dtype)
            distance_ND = nn.functional.smooth_l1_loss(student_ND, teacher_ND, reduction="none")
            loss_N = loss_N + self.feature_weight * distance_ND.mean(-1)
        if entry.confidence is not None and self.confidence_weight:
            sure_N = at_least_float32(entry.confidence(student_ND))
            loss_N = loss_N + self.confidence_weight * nn.functional.binary_cross_entropy_with_logits(
                sure_N, alpha_N.detach().clamp(0, 1), reduction="none"
            )
        loss = self.position_decay**some.k * loss_N.sum()
        if weight_n is not None:  # no decay: the accepted length itself weights the positions
            loss = loss - self.terms[ACCEPTED_LENGTH] * (weight_n * alpha_N).sum()
        return loss

    def _compared(self, compared: Compared, differentiable: bool, last_alpha: float) -> tuple[Tensor, Tensor]:
        """Return the weighted terms [N] and alpha [N]."""
        if compared.p is not None:
            kl_N, alpha_N = forward_kl_and_alpha(compared.q_ND, compared.p, self.temperature)
            return self.terms["kl"] * kl_N, alpha_N
        rows, label_rows_N = compared.rows(), draft_rows(compared.known.labels_N, compared.vocabulary_D)
        inputs = LossInputs(*rows, compared.target_argmax_N, label_rows_N, last_alpha)
        loss_N = torch.zeros_like(rows[1][:, 0])
        for kind, weight in self.terms.items():
            loss_N = loss_N + weight * LOSSES[kind](inputs)
        if self.top_k_weight:
            loss_N = loss_N + self.top_k_weight * top_k_cross_entropy(*rows, self.top_k)
        with torch.set_grad_enabled(differentiable):
            return loss_N, overlap(*rows)


class _Tokens(NamedTuple):
    """The tokens of draft position k in one chunk of the target's positions."""

    k: int
    position: Position
    place: slice
    """Their place among the tokens of the position."""
    rows_n: Tensor
    """Their rows in the chunk."""


def _chunks(aligned: Aligned, size: int) -> list[tuple[TeacherOutput, list[_Tokens]]]:
    """Divide the target's positions into chunks, each with the tokens that are trained towards it."""
    bounds = aligned.bounds(size)
    chunks = []
    for number in range(len(bounds[0]) - 1):
        known = aligned.known.at(slice(number * size, (number + 1) * size))
        tokens = []
        for k, position in enumerate(aligned.positions):
            start, stop = bounds[k][number : number + 2]
            if start < stop:
                rows_n = position.rows_N[start:stop] - number * size
                tokens.append(_Tokens(k, position, slice(start, stop), rows_n))
        chunks.append((known, tokens))
    return chunks


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the tokens by draft position, see `AgreementSums`."""

    alpha: list[Tensor]
    match: list[Tensor]
    count_K: Tensor

    @classmethod
    def of(cls, aligned: Aligned) -> "_Sums":
        """Return zeros, and the numbers of tokens."""
        device = aligned.known.labels_N.device
        zeros = [torch.zeros((), device=device) for _ in aligned.positions]
        counts = [len(position.rows_N) for position in aligned.positions]
        return cls(zeros, list(zeros), torch.tensor(counts, device=device))

    def add(self, k: int, alpha_N: Tensor, compared: Compared) -> None:
        """Add the tokens of a chunk."""
        self.alpha[k] = self.alpha[k] + alpha_N.sum()
        same_N = compared.target_argmax_N == compared.q_ND.argmax(-1)
        self.match[k] = self.match[k] + same_N.sum()
