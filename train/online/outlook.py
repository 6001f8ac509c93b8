"""`draftsmith forecast --learn`: what learning while serving would bring, from stored states of texts."""

import time
from collections.abc import Sequence
from itertools import cycle

import numpy as np
import torch
from transformers import PreTrainedModel

from draftsmith.decode.sampling import Sampling
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.eval.forecast.learning import Learn, Outlook, points_of
from draftsmith.eval.teacher_forced import TargetText, states_of
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.model_config import text_config
from draftsmith.train.online.buffer import ROW_TOKENS, Row, States
from draftsmith.train.online.candidate import learnable
from draftsmith.train.online.exported import FREE
from draftsmith.train.online.learner import LEAST_BLOCKS, LEAST_ROWS, OnlineLearning

# Shapes: T tokens, H hidden size, F size of the features, P texts.

APART, HELD = 4, 1
"""Of every four texts one is kept apart, on one updates are judged, and two are learned from."""
POINTS = 8
"""Points of the curve after the first one."""


def outlook_by(target: PreTrainedModel, steps: int, seed: int) -> Learn:
    """Return what computes the outlook of a drafter after this many optimizer steps."""

    def learn(name: str, drafter: Drafter, texts: Sequence[TargetText], sampling: Sampling) -> Outlook:
        served = learnable(drafter, text_config(target).vocab_size)
        before = {key: value.clone() for key, value in served.state_dict().items()}
        try:
            return _outlook(target, name, served, texts, sampling, steps, seed)
        finally:
            with torch.no_grad():
                for key, value in served.state_dict().items():
                    value.copy_(before[key])

    return learn


def _outlook(
    target: PreTrainedModel,
    name: str,
    served: TrainableDrafter,
    texts: Sequence[TargetText],
    sampling: Sampling,
    steps: int,
    seed: int,
) -> Outlook:
    learning = OnlineLearning(share=FREE, every=ROW_TOKENS, seed=seed)
    learning.attach(target, served)
    learning.steps, counted = 0, (learning.adopted, learning.refused)
    apart, held, learned = _divided(target, served, learning, texts, sampling)
    for rows, what in ((held, "judge updates on"), (learned, "learn from")):
        if sum(map(len, rows)) < LEAST_ROWS:
            raise ConfigError(
                f"learn with {len(texts)} texts, which leave {sum(map(len, rows))} rows of {ROW_TOKENS} tokens to "
                f"{what}; expected at least {LEAST_ROWS}: more --count or --max-new-tokens"
            )
    blocks = {row.block for rows in held for row in rows}
    if len(blocks) < LEAST_BLOCKS:
        raise ConfigError(
            f"learn with {len(texts)} texts, of which {len(held)} are left to judge updates on; "
            f"expected at least {LEAST_BLOCKS}: --count {APART * LEAST_BLOCKS} or more"
        )
    started, marks = time.perf_counter(), [0]
    adopted, scores = [0], [_scores(learning, apart)]
    for row in (row for rows in held for row in rows):
        learning.learn_from(row, held=True)
    for row in cycle(row for rows in learned for row in rows):
        learning.learn_from(row, held=False)
        if learning.steps >= steps * len(marks) / POINTS:
            marks.append(learning.steps)
            adopted.append(learning.adopted - counted[0])
            scores.append(_scores(learning, apart))
        if learning.steps >= steps:
            break
    points, expected = points_of(marks, adopted, *np.stack(scores).transpose(2, 0, 1))
    return {
        "drafter": name,
        "temperature": sampling.temperature,
        "texts": {"learned": len(learned), "judged": len(held), "apart": len(apart)},
        "passes": steps * learning.batch_rows / sum(map(len, learned)),
        "seconds": time.perf_counter() - started,
        "refused": learning.refused - counted[1],
        "points": points,
        "expected": expected,
    }


def _divided(
    target: PreTrainedModel,
    served: TrainableDrafter,
    learning: OnlineLearning,
    texts: Sequence[TargetText],
    sampling: Sampling,
) -> tuple[list[list[Row]], list[list[Row]], list[list[Row]]]:
    """Return the rows of the texts that are kept apart, that updates are judged on, and that are learned from."""
    teacher = OnlineTeacher(target, served.needs.layers)
    rows = [list(learning.rows_of(text, _states(teacher, text), sampling, number)) for number, text in enumerate(texts)]
    parts = [[one for place, one in enumerate(rows) if place % APART == part and one] for part in range(APART)]
    return parts[0], parts[HELD], [one for part in parts[HELD + 1 :] for one in part]


def _states(teacher: OnlineTeacher, text: TargetText) -> States:
    """Return the target's states of a text."""
    hidden_TH, features_TF = states_of(teacher, text)
    return lambda start, end: (hidden_TH[start:end], None if features_TF is None else features_TF[start:end])


def _scores(learning: OnlineLearning, texts: list[list[Row]]) -> np.ndarray:
    """Return committed tokens and rounds of each text with the drafter in use, [P, 2]."""
    return np.stack([learning.scores_of(rows).sum(0) for rows in texts])
