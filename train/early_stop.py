"""When a run ends before its last step: `train.target_tau` and `train.patience`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from draftsmith.train.learning_rates import decay_steps
from draftsmith.train.recipe import Recipe


class EarlyEnd(NamedTuple):
    """The last step of a run, and why."""

    step: int
    reason: str


def early_end(recipe: Recipe, metrics: Sequence[Mapping[str, Any]], step: int, decaying: bool) -> EarlyEnd | None:
    """Return where the run is to end by its evaluations up to `step`; None where it is to continue as planned.

    A run with the schedule 'wsd' ends after its decay, which begins now. `decaying`: it has begun already.
    """
    from draftsmith.eval.learning_curve import LearningCurve  # few runs need it

    target, window = recipe.train.target_tau, recipe.train.patience
    curves = [curve for key in ("evaluation", "average") if (curve := LearningCurve.of(metrics, key)) is not None]
    for curve in curves:
        if target is not None and curve.last().interval[0] >= target:
            return EarlyEnd(step, f"tau {curve.last()} has reached train.target_tau={target:g}")
    if window is None or decaying or not curves:
        return None
    rises = [rise for curve in curves if (rise := curve.rise(window)) is not None]
    if len(rises) < len(curves) or any(rise.interval[0] > 0 for rise in rises):
        return None
    rise = max(rises)  # of own and averaged weights
    reason = f"tau has stopped rising: {rise.value:+.2f} [{rise.interval[0]:.2f}, {rise.interval[1]:.2f}] "
    reason += f"from {window} evaluations to the next {window}"
    last = step + decay_steps(recipe) if recipe.train.schedule == "wsd" else step
    return None if last >= recipe.train.steps else EarlyEnd(last, reason)
