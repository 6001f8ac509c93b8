"""Early stops: a signal or a full disk on one process stops all after the same step; a bad loss stops them at once."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate.utils import gather_object
from torch import Tensor

from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.teacher import Batch
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import TeacherSignals
from draftsmith.storage import write_json
from draftsmith.train.data import TrainingData
from draftsmith.train.launch import RunContext, autocast
from draftsmith.train.run_folder import CHECKPOINTS, FAILED
from draftsmith.train.step import Teacher

NAMED = 8
"""Rows that a message names."""
SHOWN = 60
"""Characters of a row's text in a message."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME = 1.0
"""Seconds in which a second signal counts as the same one: launchers forward signals that the terminal sent to all."""


class Stopping:
    """Handles SIGTERM and SIGINT inside the context, and holds the reason to stop.

    The first signal is recorded, and the current step is finished. A second one ends the process at once. The record
    of a process is a few numbers, `flags`, which are reduced over the processes together with other sums; `agree` takes
    the reduced values, so that all processes decide the same at the same point.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The signal that this process received."""
        self.agreed: int | None = None
        """The signal that all processes stop for."""
        self.problem: str | None = None
        """The error of this process for which the run cannot continue."""
        self._since, self._at_once = 0.0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def flags(self) -> list[float]:
        """Return numbers that are to be summed over all processes."""
        return [*(float(self.received == number) for number in SIGNALS), float(self.problem is not None)]

    def agree(self, sums: Sequence[float]) -> None:
        """Set the outcome from the sums of all processes' `flags`.

        Raises:
            DraftsmithError: on all processes, when one of them has a problem.
        """
        *signals, problems = sums
        if problems:
            raise DraftsmithError(self.problem or "another process had to stop; its line says why")
        self.agreed = next((number for number, count in zip(SIGNALS, signals, strict=True) if count), self.agreed)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let signals end the process immediately, inside a context of long work whose results are on disk."""
        self._at_once = True
        try:
            if (number := self.agreed or self.received) is not None:
                leave(number)
            yield
        finally:
            self._at_once = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._since = number, now
            if self._at_once:
                leave(number)
        elif now - self._since > SAME:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def leave(number: int) -> NoReturn:
    """Exit as the signal would have: with code 128 + its number, which for SIGINT follows from KeyboardInterrupt."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


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
    with autocast(context.recipe, context.accelerator.device):
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
        parts = hidden_NH.split(chunk_tokens) if hidden_NH.shape[1] else ()  # none: a file has log-probabilities alone
        whole = all(bool(part.isfinite().all()) for part in states)
        finite.append(whole and all(_are_logits(teacher.lm_head(part)) for part in parts))
    return finite


def _are_logits(values: Tensor) -> bool:
    """Return whether no value is NaN or positive infinity; a logit of -inf is a token that the target never gives."""
    return not bool((values.isnan() | values.isposinf()).any())
