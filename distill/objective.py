"""The training objective: weighted disagreement over all draft positions, summed chunk by chunk.

All values are sums over this process's tokens. Only the training loop divides them, by the number of tokens in the
global batch, so that the loss depends neither on padding nor on the number of processes.

The logits of all tokens are never in memory at once: a part's gradient is computed with its loss. Recomputing parts in
the backward pass would save as much memory and cost another forward pass of both lm_heads.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftsmith.distill.draft_probabilities import (
    LmHead,
    Position,
    TargetChunk,
    align,
    at_least_float32,
    forward_kl_and_alpha,
    logits_of,
    tempered,
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
        positions, places_N = align(unrolled, signals)
        terms, weights = self.terms, None
        if ACCEPTED_LENGTH in terms:
            weights = DraftWeights(positions, self.draft_length, signals.mask_BT.shape[1])
        sums = _Sums.of(positions)
        chunks = _chunks(positions, places_N, self.chunk_tokens)
        target_at = self._target(signals, lm_head, positions[0].entry.vocabulary_D)
        parts = self._parts(chunks, target_at, sums, weights, last_alpha or [0.0] * len(unrolled))
        states = [position.student_ND for position in positions]
        loss = summed_loss(parts, states, [parameter for entry in unrolled for parameter in entry.parameters()])
        if weights is not None:
            loss = loss + terms[ACCEPTED_LENGTH] * weights.constant()
        return AgreementSums(loss, torch.stack(sums.alpha), torch.stack(sums.match), sums.count_K)

    def _parts(
        self,
        chunks: Sequence[tuple[Tensor, list["_Tokens"]]],
        target_at: Callable[[Tensor], TargetChunk],
        sums: "_Sums",
        weights: DraftWeights | None,
        last_alpha: Sequence[float],
    ) -> Iterator[Part]:
        """Yield the tokens of each draft position for each chunk of the target's positions.

        A token's weight may depend on tokens of its draft in later chunks: those are compared first, without gradient.
        """
        ahead = 0 if weights is None else -(-(weights.longest - 1) // self.chunk_tokens)
        waiting: deque[tuple[TargetChunk, list[_Tokens]]] = deque()
        for number in range(len(chunks) + ahead):
            if number < len(chunks):
                places_n, tokens = chunks[number]
                target = target_at(places_n)
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

    def _target(
        self, signals: TeacherSignals, lm_head: LmHead, vocabulary_D: Tensor | None
    ) -> Callable[[Tensor], TargetChunk]:
        """Return a function that computes the target at positions of the flattened batch."""
        # The rows of the lm_head for the draft vocabulary give p where the sums over all logits are stored.
        stored = signals.log_sum_BT is not None and self.temperature == 1
        draft_head = draft_rows_of(lm_head, vocabulary_D) if stored and vocabulary_D is not None else None
        # Forward KL at one temperature and alpha are computed together, where nothing else needs probabilities.
        fused = self.terms.keys() == {"kl"} and not self.top_k_weight
        how = {"draft_head": draft_head, "fused": fused}
        return lambda places_n: TargetChunk.of(signals, places_n, lm_head, self.temperature, vocabulary_D, **how)

    def _record(self, weights: DraftWeights, target: TargetChunk, tokens: Sequence["_Tokens"]) -> None:
        """Record alpha of the tokens of a chunk; the weights follow from it."""
        for some in tokens:
            q_nD = logits_of(some.position.entry.head, some.position.student_ND[some.place])
            weights.record(some.k, some.place, overlap(*self._log_probabilities(target.at(some.rows_n), q_nD)))

    def _loss(
        self,
        chunk: TargetChunk,
        some: "_Tokens",
        weight_n: Tensor | None,
        last_alpha: float,
        sums: "_Sums",
        student_ND: Tensor,
    ) -> Tensor:
        """Return the summed loss of some tokens of a draft position, and add their agreement to `sums`.

        `weight_n`: see `DraftWeights`; None without the term accepted_length.
        """
        entry, target = some.position.entry, chunk.at(some.rows_n)
        q_ND = logits_of(entry.head, student_ND)
        loss_N, alpha_N = self._compared(target, q_ND, weight_n is not None, last_alpha)
        if entry.base_head is not None:
            loss_N = loss_N + self._compared(target, logits_of(entry.base_head, student_ND), False, last_alpha)[0]
        sums.add(some.k, alpha_N.detach(), target.argmax_N == q_ND.argmax(-1))
        if self.feature_weight and entry.regresses:
            teacher_ND = target.hidden_NH.to(student_ND.dtype)
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

    def _compared(
        self, target: TargetChunk, q_ND: Tensor, differentiable: bool, last_alpha: float
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted terms [N] and alpha [N] of the drafter's logits."""
        if target.p is not None:
            kl_N, alpha_N = forward_kl_and_alpha(q_ND, target.p, self.temperature)
            return self.terms["kl"] * kl_N, alpha_N
        rows = self._log_probabilities(target, q_ND)
        inputs = LossInputs(*rows, target.argmax_N, target.labels_N, last_alpha)
        loss_N = torch.zeros_like(rows[1][:, 0])
        for kind, weight in self.terms.items():
            loss_N = loss_N + weight * LOSSES[kind](inputs)
        if self.top_k_weight:
            loss_N = loss_N + self.top_k_weight * top_k_cross_entropy(*rows, self.top_k)
        with torch.set_grad_enabled(differentiable):
            return loss_N, overlap(*rows)

    def _log_probabilities(self, target: TargetChunk, q_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return those of target and drafter over the drafter's vocabulary."""
        assert target.p_log_ND is not None, "log-probabilities are kept unless the terms are fused"
        return target.p_log_ND, tempered(at_least_float32(q_ND), self.temperature).log_softmax(-1)


class _Tokens(NamedTuple):
    """The tokens of draft position k in one chunk of the target's positions."""

    k: int
    position: Position
    place: slice
    """Their place among the tokens of the position."""
    rows_n: Tensor
    """Their rows in the chunk."""


def _chunks(positions: Sequence[Position], places_N: Tensor, size: int) -> list[tuple[Tensor, list[_Tokens]]]:
    """Divide the target's trained positions into chunks, each with the tokens that are trained towards it."""
    edges = torch.arange(0, len(places_N) + size, size, device=places_N.device)
    bounds = [torch.bucketize(edges, position.rows_N).tolist() for position in positions]
    chunks = []
    for number in range(len(edges) - 1):
        tokens = []
        for k, position in enumerate(positions):
            start, stop = bounds[k][number : number + 2]
            if start < stop:
                rows_n = position.rows_N[start:stop] - number * size
                tokens.append(_Tokens(k, position, slice(start, stop), rows_n))
        chunks.append((places_N[number * size : (number + 1) * size], tokens))
    return chunks


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the tokens by draft position, see `AgreementSums`."""

    alpha: list[Tensor]
    match: list[Tensor]
    count_K: Tensor

    @classmethod
    def of(cls, positions: Sequence[Position]) -> "_Sums":
        """Return zeros, and the counts of tokens."""
        device = positions[0].rows_N.device
        zeros = [torch.zeros((), device=device) for _ in positions]
        counts = [len(position.rows_N) for position in positions]
        return cls(zeros, list(zeros), torch.tensor(counts, device=device))

    def add(self, k: int, alpha_N: Tensor, same_N: Tensor) -> None:
        """Add the tokens of a chunk."""
        self.alpha[k] = self.alpha[k] + alpha_N.sum()
        self.match[k] = self.match[k] + same_N.sum()
