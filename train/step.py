"""The module that accelerate wraps: drafter and objective together, so that every engine sees one forward."""

from torch import Tensor, nn

from draftsmith.distill.objectives import Objective
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.heads.drafter import Drafter, TeacherSignals


class AgreementStep(nn.Module):
    """Teacher signals in, sums over this process's tokens out. Only the drafter's parameters belong to it."""

    def __init__(self, drafter: Drafter, objective: Objective, teacher: OnlineTeacher) -> None:
        super().__init__()
        self.drafter = drafter
        self._objective = objective
        # In a tuple, so that the frozen lm_head is not registered as something to train, wrap or save.
        self._teacher = (teacher,)

    def forward(self, signals: TeacherSignals) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(loss, alpha [K], match [K], count [K]); see `AgreementSums`."""
        sums = self._objective(self.drafter.unroll(signals), signals, self._teacher[0].lm_head)
        return sums.loss, sums.alpha_K, sums.match_K, sums.count_K
