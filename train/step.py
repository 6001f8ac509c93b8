"""The modules that accelerate wraps: drafter and objective together, so that every engine sees one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from draftsmith.decode.clock import PartClock
from draftsmith.distill.cotraining import Adapters, quality_kl
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher, TargetHead
from draftsmith.heads.base import TeacherSignals, TrainableDrafter
from draftsmith.heads.lora import without_lora
from draftsmith.train.batch import Batch
from draftsmith.train.progress import PARTS
from draftsmith.train.recipe_sections import CotrainSection

if TYPE_CHECKING:
    from draftsmith.heads.read_positions import SequencePart

RAMP = 0.2
"""Share of a run's steps, after the warm-up, in which the weight of the drafter's loss for adapters rises."""

# Shapes: B sequences, T positions, K draft positions, H hidden size, N trained positions.


class Teacher(Protocol):
    """The target in the loop, its stored hidden states, or a file of log-probabilities."""

    lm_head: TargetHead

    def signals(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor,
        mask_BT: Tensor,
        source_BS: None = None,
        source_mask_BS: None = None,
        rows: Sequence[int] = (),
        documents_BT: Tensor | None = None,
        inputs: tuple[()] = (),
    ) -> TeacherSignals:
        """Return the target's outputs for a batch. Only the online teacher takes a source or images."""
        ...


class StepSums(NamedTuple):
    """Sums over this process's tokens; see `AgreementSums`."""

    loss: Tensor
    alpha_K: Tensor
    match_K: Tensor
    count_K: Tensor
    quality_kl: Tensor
    """KL of the adapted target from the original, in nats; zero for a frozen target."""

    def plus(self, before: "StepSums | None") -> "StepSums":
        """Return the sums with those of other batches, if there are any."""
        return self if before is None else StepSums(*(a + b for a, b in zip(before, self, strict=True)))


@dataclass(frozen=True)
class Last:
    """Means of the last step over all processes, so that a step does not depend on how its batch is divided."""

    alpha: list[float] | None = None
    """By draft position; None before the first step."""
    quality_kl: float = 0.0
    """KL of the adapted target from the original, in nats per token."""


class AgreementStep(nn.Module):
    """Maps a batch to sums over this process's tokens. Its parameters are the drafter's only."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        objective: Objective,
        teacher: Teacher,
        *,
        part: "SequencePart | None" = None,
        clock: PartClock | None = None,
    ) -> None:
        """`part`: see `TeacherSignals`. `clock`: measures the parts of the forward pass."""
        super().__init__()
        self.drafter = drafter
        self._objective, self._part = objective, part
        # In a tuple, so that the frozen target is not registered as a submodule to train, wrap or save.
        self._teacher = (teacher,)
        self.clock = PartClock(torch.device("cpu"), PARTS) if clock is None else clock

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        """`done`: the share of the run's steps that have been taken."""
        teacher = self._teacher[0]
        signals = teacher.signals(**vars(batch))
        if self._part is not None:
            signals = replace(signals, part=self._part)
        self.clock.end("teacher")
        unrolled = self.drafter.unroll(signals)
        self.clock.end("drafter")
        sums = self._objective(unrolled, signals, teacher.lm_head, last.alpha)
        self.clock.end("objective")
        return StepSums(sums.loss, sums.alpha_K, sums.match_K, sums.count_K, sums.loss.detach() * 0)


class CotrainStep(AgreementStep):
    """Train the drafter alone, then drafter and adapters with the drafter's loss and the KL to the original target.

    The gradient of the drafter's loss with respect to the adapters is weighted: the weight rises over the ramp
    (Medusa-2), and falls to zero as the last step's KL nears the bound, so that the adapters stay within the bound.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        objective: Objective,
        teacher: OnlineTeacher,
        adapters: Adapters,
        settings: CotrainSection,
        *,
        clock: PartClock | None = None,
    ) -> None:
        super().__init__(drafter, objective, teacher, clock=clock)
        self.adapters = nn.ParameterList(adapters.parameters.values())
        self._settings, self._online = settings, (teacher,)

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        settings, teacher = self._settings, self._online[0]
        if done < settings.warmup_fraction:
            sums = super().forward(batch, done, last)
            return sums._replace(loss=sums.loss + 0 * sum(weight.sum() for weight in self.adapters))
        with without_lora(teacher.model):
            original_NH = teacher.signals(**vars(batch)).hidden_BTH[batch.mask_BT]
        signals = teacher.signals(**vars(batch), gradient=True)
        self.clock.end("teacher")
        chunk = self._objective.chunk_tokens
        quality = quality_kl(teacher.lm_head, original_NH, signals.hidden_BTH[batch.mask_BT], chunk)
        self.clock.end("objective")
        ramp = min(1.0, (done - settings.warmup_fraction) / RAMP)
        room = max(0.0, 1 - last.quality_kl / settings.max_quality_kl)
        weight = settings.drafter_weight * ramp * room
        read = replace(
            signals,
            hidden_BTH=_scaled_gradient(signals.hidden_BTH, weight),
            features_BTF=None if signals.features_BTF is None else _scaled_gradient(signals.features_BTF, weight),
        )
        # Adapters get gradients through the drafter's inputs only: p is constant, and the drafter follows it.
        known = replace(signals, hidden_BTH=signals.hidden_BTH.detach())
        unrolled = self.drafter.unroll(read)
        self.clock.end("drafter")
        sums = self._objective(unrolled, known, teacher.lm_head, last.alpha)
        self.clock.end("objective")
        loss = sums.loss + quality
        return StepSums(loss, sums.alpha_K, sums.match_K, sums.count_K, quality.detach())


def _scaled_gradient(states: Tensor, weight: float) -> Tensor:
    """Return `states` with a gradient scaled by `weight`: the drafter learns at its full rate, the adapters less."""
    fixed = states.detach()
    return fixed + weight * (states - fixed)
