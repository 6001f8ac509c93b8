"""The modules that accelerate wraps: drafter and objective together, so that every engine sees one forward."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from draftsmith.distill.cotraining import Adapters, quality_kl
from draftsmith.distill.hidden_state_cache import CachedTeacher
from draftsmith.distill.logprob_teacher import LogprobTeacher
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads.base import Drafter
from draftsmith.heads.lora import without_lora
from draftsmith.train.data import Batch

Teacher = OnlineTeacher | CachedTeacher | LogprobTeacher


class StepSums(NamedTuple):
    """Sums over this process's tokens; see `AgreementSums`."""

    loss: Tensor
    alpha_K: Tensor
    match_K: Tensor
    count_K: Tensor
    quality_kl: Tensor
    """Of the adapted target from the original, in nats; zero for a frozen target."""


@dataclass(frozen=True)
class Last:
    """What the last step found over all processes, so that a step does not depend on how its batch is shared out."""

    alpha: list[float] | None = None
    """By draft position; None before there was a step."""
    quality_kl: float = 0.0
    """Of the adapted target from the original, in nats a token."""


class AgreementStep(nn.Module):
    """A batch in, sums over this process's tokens out. Only the drafter's parameters belong to it."""

    def __init__(self, drafter: Drafter, objective: Objective, teacher: Teacher) -> None:
        super().__init__()
        self.drafter = drafter
        self._objective = objective
        # In a tuple, so that the frozen target is not registered as something to train, wrap or save.
        self._teacher = (teacher,)

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        """`done`: the share of the run's steps that are behind."""
        teacher = self._teacher[0]
        signals = teacher.signals(**vars(batch))
        sums = self._objective(self.drafter.unroll(signals), signals, teacher.lm_head, last.alpha)
        return StepSums(sums.loss, sums.alpha_K, sums.match_K, sums.count_K, sums.loss.detach() * 0)


@dataclass(frozen=True)
class CotrainSettings:
    """The recipe's section `cotrain`, but for the adapters' sizes."""

    warmup_fraction: float
    ramp_fraction: float
    drafter_weight: float
    quality_weight: float
    max_quality_kl: float


class CotrainStep(AgreementStep):
    """First the drafter alone, then drafter and adapters: the drafter's loss, and the KL to the original target.

    What the adapters see of the drafter's loss is weighted: the weight rises over the ramp (Medusa-2), and falls to
    nothing as the last step's KL nears the bound, so that they turn back before they pass it.
    """

    def __init__(
        self,
        drafter: Drafter,
        objective: Objective,
        teacher: OnlineTeacher,
        adapters: Adapters,
        settings: CotrainSettings,
    ) -> None:
        super().__init__(drafter, objective, teacher)
        self.adapters = nn.ParameterList(adapters.parameters.values())
        self._settings = settings

    def forward(self, batch: Batch, done: float, last: Last) -> StepSums:
        settings, teacher = self._settings, self._teacher[0]
        if done < settings.warmup_fraction:
            sums = super().forward(batch, done, last)
            return sums._replace(loss=sums.loss + 0 * sum(weight.sum() for weight in self.adapters))
        with without_lora(teacher.model):
            original_NH = teacher.signals(**vars(batch)).hidden_BTH[batch.mask_BT]
        signals = teacher.signals(**vars(batch), gradient=True)
        chunk = self._objective.chunk_tokens
        quality = quality_kl(teacher.lm_head, original_NH, signals.hidden_BTH[batch.mask_BT], chunk)
        ramp = min(1.0, (done - settings.warmup_fraction) / max(settings.ramp_fraction, 1e-9))
        room = max(0.0, 1 - last.quality_kl / settings.max_quality_kl)
        weight = settings.drafter_weight * ramp * room
        read = replace(
            signals,
            hidden_BTH=_scaled_gradient(signals.hidden_BTH, weight),
            features_BTF=None if signals.features_BTF is None else _scaled_gradient(signals.features_BTF, weight),
        )
        # Only what the drafter reads is pulled at: p is what it is, and the drafter follows.
        known = replace(signals, hidden_BTH=signals.hidden_BTH.detach())
        sums = self._objective(self.drafter.unroll(read), known, teacher.lm_head, last.alpha)
        loss = sums.loss + settings.quality_weight * quality
        return StepSums(loss, sums.alpha_K, sums.match_K, sums.count_K, quality.detach())


def _scaled_gradient(states: Tensor, weight: float) -> Tensor:
    """`states`, whose gradient is multiplied by `weight`: the drafter learns at full speed, the adapters do not."""
    fixed = states.detach()
    return fixed + weight * (states - fixed)
