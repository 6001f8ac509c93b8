"""Losses that are not finite: which rows cause them, and the error that ends the run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.teacher import Batch
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import TeacherSignals
from draftsmith.storage import write_json
from draftsmith.train.launch import RunContext
from draftsmith.train.run_folder import CHECKPOINTS, FAILED
from draftsmith.train.step import Teacher, autocast
from draftsmith.train.training_data import TrainingData

NAMED = 8
"""Rows that a message names."""
SHOWN = 60
"""Characters of a row's text in a message."""


def failure(
    context: RunContext,
    target: LoadedTarget,
    teacher: Teacher,
    data: TrainingData,
    indices: Sequence[int],
    values: dict[str, str | int],
    batch: Callable[[list[int]], Batch],
) -> DraftsmithError:
    """Write the batch to `failed_batch.json`, and return the error that names the rows of which the loss is not finite.

    All processes must call it.

    Args:
        indices: rows of the global batch.
        values: what is not finite, and when.
        batch: returns the rows of these indices.
    """
    folder = Path(context.recipe.output)
    wrong = _wrong_rows(context, teacher, indices, batch)
    if context.accelerator.is_main_process:
        rows = [{"row": index, **data.rows[index]} for index in indices]
        write_json(folder / FAILED, {**values, "not_finite": wrong, "rows": rows})
    what = ", ".join(f"{name}={value}" for name, value in values.items())
    kept = f"the state before it is in {folder / CHECKPOINTS}, and its rows are in {folder / FAILED}"
    if not wrong:
        cause = f"the teacher's numbers are finite in all {len(indices)} rows, so the drafter's are not"
        return DraftsmithError(f"{what}; expected finite numbers: {cause}. Try a lower train.learning_rate; {kept}")
    named = ", ".join(map(str, wrong[:NAMED])) + ", …" * (len(wrong) > NAMED)
    begins = json.dumps(target.tokenizer.decode(data.rows[wrong[0]]["input_ids"])[:SHOWN], ensure_ascii=False)
    subject = f"row {named}, which begins {begins}" if len(wrong) == 1 else f"rows {named}; the first begins {begins}"
    cause = f"the teacher's states or logits are not finite in {len(wrong)} of {len(indices)} rows ({subject})"
    listed = json.dumps(sorted({*context.recipe.data.exclude_rows, *wrong}), separators=(",", ":"))
    then = f"The same command with data.exclude_rows={listed} continues without"
    return DraftsmithError(f"{what}; expected finite numbers: {cause}. {then}; {kept}")


@torch.no_grad()
def _wrong_rows(
    context: RunContext, teacher: Teacher, indices: Sequence[int], batch: Callable[[list[int]], Batch]
) -> list[int]:
    """Return the rows for which the teacher's states or logits are not finite, each read by itself."""
    shares, share = context.text_share
    each = -(-len(indices) // shares)  # as many passes on each process, as sharded weights need
    own = [indices[place % len(indices)] for place in range(share * each, (share + 1) * each)]
    wrong: list[int] = []
    with autocast(context.recipe.train, context.accelerator.device):
        for row in own:
            signals = teacher.signals(batch([row]))
            if not all(finite_rows(teacher, signals, context.recipe.objective.chunk_tokens)):
                wrong.append(row)
    return sorted(set(gather_object(wrong)))


def finite_rows(teacher: Teacher, signals: TeacherSignals, chunk_tokens: int) -> list[bool]:
    """Return for each row of a batch whether the teacher's states and logits are finite."""
    finite: list[bool] = []
    for row, seen_T in enumerate(signals.attention_mask_BT.bool()):
        states = [part[row][seen_T] for part in (signals.hidden_BTH, signals.features_BTF) if part is not None]
        hidden_NH = signals.hidden_BTH[row][signals.mask_BT[row]]
        whole = all(bool(part.isfinite().all()) for part in states)
        finite.append(whole and all(_are_logits(teacher.lm_head(part)) for part in hidden_NH.split(chunk_tokens)))
    return finite


def _are_logits(values: Tensor) -> bool:
    """Return whether no value is NaN or positive infinity; a logit of -inf is a token that the target never gives."""
    return not bool((values.isnan() | values.isposinf()).any())
