"""Optimizer steps of a candidate on stored rows, and the time of one before anything is served."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.clock import now
from draftsmith.decode.sampling import Sampling
from draftsmith.distill.embedded.training import bf16_is_fast
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import TargetHead
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.model_config import text_config
from draftsmith.train.builders import optimizers
from draftsmith.train.online.buffer import ROW_TOKENS, Row, signals_of
from draftsmith.train.online.candidate import Candidate

WARMUP = 8
"""Optimizer steps in which the rate rises, after each start of the optimizers."""
CLIP = 1.0


class Steps:
    """The optimizers of a candidate; a call takes one step.

    Args:
        peak: learning rate after the warm-up.
    """

    def __init__(
        self,
        candidate: Candidate,
        lm_head: TargetHead,
        objective: Objective,
        optimizer: Literal["muon", "adamw"],
        peak: float,
    ) -> None:
        self._candidate, self._lm_head, self._objective = candidate, lm_head, objective
        self._optimizer, self._peak = optimizer, peak
        self._device = next(candidate.trained.parameters()).device
        self.restart()

    def restart(self) -> None:
        """Forget the moments and the steps that were taken."""
        dtype = torch.bfloat16 if bf16_is_fast(self._device) else torch.float32
        self._optimizers = optimizers(self._candidate.trained, self._optimizer, 0.0, dtype=dtype)
        self._last_alpha: list[float] | None = None
        self._taken = 0

    def __call__(self, rows: Sequence[Row]) -> bool:
        """Take a step on these rows, average the weights, and return whether the gradient was finite."""
        warm = min(1.0, (self._taken + 1) / WARMUP)
        finite = self._take(rows, self._peak * warm)
        self._candidate.average()
        self._taken += 1
        return finite

    def seconds(self, row: Row, count: int) -> float:
        """Return the time of a step on so many copies of a row, at a rate of zero: the weights stay as they are."""
        elapsed = 0.0
        for rows in (1, count):  # the first step allocates memory and prepares kernels
            started = now(self._device)
            self._take([row] * rows, rate=0.0)
            elapsed = now(self._device) - started
        self._candidate.roll_back()  # 0 times an update that is not finite would remain
        self.restart()
        return elapsed

    def _take(self, rows: Sequence[Row], rate: float) -> bool:
        drafter = self._candidate.trained.train()
        signals = signals_of(rows, self._device)
        sums = self._objective(drafter.unroll(signals), signals, self._lm_head, self._last_alpha)
        (sums.loss / signals.mask_BT.sum()).backward()
        parameters = [weight for weight in drafter.parameters() if weight.requires_grad]
        norm = float(nn.utils.clip_grad_norm_(parameters, CLIP))
        finite = bool(np.isfinite(norm))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        self._last_alpha = (sums.alpha_K / sums.count_K.clamp_min(1)).tolist()
        return finite


def blank_row(drafter: TrainableDrafter, target: PreTrainedModel, lm_head: TargetHead, context: int) -> Row:
    """Return a row of the usual length, or as long as the drafter reads, whose tokens and states are zero."""
    length = min(context + 1 + ROW_TOKENS, drafter.context_limit or context + 1 + ROW_TOKENS)
    first = min(context + 1, length // 2)
    text = TargetText([0] * length, first, length, [0] * length if target.config.is_encoder_decoder else [])
    like = {"dtype": target.dtype, "device": target.device}
    features_TF = None
    if drafter.needs.layers:
        features_TF = torch.zeros(length - 1, len(drafter.needs.layers) * text_config(target).hidden_size, **like)
    return Row(text, torch.zeros(length - first, lm_head.weight.shape[1], **like), features_TF, Sampling())
