"""The validation pass: the mean objective over samples that are not trained on (`data.validation`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from draftsmith.train.batch import Batch, response_tokens
from draftsmith.train.context import RunContext
from draftsmith.train.data import TrainingData
from draftsmith.train.engine import reduced
from draftsmith.train.recorder import Record
from draftsmith.train.step import Last, StepSums


class Validation:
    """Computes the mean objective, alpha and top-1 agreement over the validation rows."""

    def __init__(
        self, context: RunContext, module: nn.Module, record: Record, batch: Callable[[list[int]], Batch]
    ) -> None:
        """`module`: the step, as the engine wraps it. `batch` returns the rows of these indices."""
        self._context, self._module, self._record, self._batch = context, module, record, batch

    def rows(self, data: TrainingData) -> list[int]:
        """Return the indices of the validation rows, without those that the recipe excludes."""
        excluded = self._context.recipe.data.exclude_rows
        return [row for row in range(data.trained, len(data.rows)) if row not in excluded]

    @torch.no_grad()
    def __call__(self, data: TrainingData, step: int, last: Last) -> dict[str, Any] | None:
        """Return the means after `step`, the same on all processes; None without such rows, and where a signal came."""
        rows, settings = self.rows(data), self._context.recipe.train
        if not rows:
            return None
        shares, share = self._context.text_share
        size = settings.batch_size // (shares * settings.gradient_accumulation)
        totals: StepSums | None = None
        self._module.eval()
        for begin in range(0, len(rows), shares * size):
            mine = rows[begin + share * size : begin + (share + 1) * size]
            torch.manual_seed(begin + share)  # block drafters draw the positions that they are trained at
            # All processes run the same passes, as sharded weights need; one without rows of its own counts none.
            sums: StepSums = self._module(self._batch(mine or [rows[0]]), step / settings.steps, last)
            totals = StepSums(*(value if mine else torch.zeros_like(value) for value in sums)).plus(totals)
            self._record.meet()
            if self._record.stopping.agreed is not None:
                break
        self._module.train()
        if isinstance(self._module, FSDPModule):
            self._module.reshard()  # in training the backward pass does
        if totals is None or self._record.stopping.agreed is not None:
            return None
        loss, alpha_K, match_K, count_K = (reduced(self._context.accelerator, value) for value in totals[:4])
        count_K = count_K.clamp_min(1)
        return {
            "loss": loss.item() / response_tokens(data.rows, rows),
            "alpha": (alpha_K / count_K).tolist(),
            "top1": (match_K / count_K).tolist(),
        }
