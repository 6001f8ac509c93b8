"""The section `learning` of a forecast: what learning while serving would bring, on texts that it has not seen.

It is computed in `train/online/outlook.py`.
"""

from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import TypedDict

from draftsmith.decode.sampling import Sampling
from draftsmith.eval.learning_curve import LearningCurve
from draftsmith.eval.metrics import RESAMPLES, percentiles, ratio
from draftsmith.eval.online import gain_text
from draftsmith.eval.teacher_forced import TargetText
from draftsmith.heads.base import Drafter

# Shapes: E points, P texts, S resamples.


class Point(TypedDict):
    """The drafter in use after some steps, on the texts that are kept apart."""

    steps: int
    adopted: int
    """Updates so far."""
    tau: float
    gain: float
    """Relative to the drafter without learning."""
    gain_interval: list[float]
    """95 %, over texts, which are drawn for both together."""


class Outlook(TypedDict):
    """The gain that a drafter would have from learning on stored states of texts."""

    drafter: str
    temperature: float
    texts: dict[str, int]
    """Number of texts that are learned from, on which updates are judged, and of `points`."""
    passes: float
    """Times that each text was learned from."""
    seconds: float
    refused: int
    points: list[Point]
    expected: tuple[int, float, list[float]] | None
    """Steps, and tau after them by the fit of `LearningCurve`, with its interval; None for too few points."""


Learn = Callable[[str, Drafter, Sequence[TargetText], Sampling], Outlook]
"""Returns the outlook of a drafter of this name on texts of the target; the drafter stays as it is."""


def points_of(
    steps_E: Sequence[int], adopted_E: Sequence[int], tokens_EP: np.ndarray, rounds_EP: np.ndarray
) -> tuple[list[Point], tuple[int, float, list[float]] | None]:
    """Return the points and the expectation for twice the steps; the first point is before learning."""
    texts = tokens_EP.shape[1]
    drawn_SP = np.random.default_rng(0).multinomial(texts, np.full(texts, 1 / texts), size=RESAMPLES)
    taus_SE = ratio(drawn_SP @ tokens_EP.T, drawn_SP @ rounds_EP.T)
    taus_E = ratio(tokens_EP.sum(1), rounds_EP.sum(1))
    points: list[Point] = [
        {
            "steps": steps_E[place],
            "adopted": adopted_E[place],
            "tau": float(taus_E[place]),
            "gain": float(taus_E[place] / taus_E[0]) - 1,
            "gain_interval": percentiles(ratio(taus_SE[:, place], taus_SE[:, 0]) - 1),
        }
        for place in range(len(steps_E))
    ]
    expected = LearningCurve(np.array(steps_E, float), tokens_EP, rounds_EP).expected(2)
    then = None if expected is None else expected[1]
    return points, None if then is None else (2 * steps_E[-1], then.value, list(then.interval))


def learning_lines(outlook: Outlook) -> list[str]:
    """Return the outlook in sentences."""
    texts, last = outlook["texts"], outlook["points"][-1]
    after = ", ".join(f"{point['steps']}: {point['tau']:.2f} ({point['adopted']})" for point in outlook["points"])
    lines = [
        f"learning, {outlook['drafter']} at T={outlook['temperature']:g}, from {texts['learned']} texts, "
        f"{outlook['passes']:.1f} times each, in {outlook['seconds']:.0f} s; tau by steps (updates adopted) on "
        f"{texts['apart']} other texts: {after}",
        f"after {last['steps']} steps: {gain_text(last['gain'], last['gain_interval'])} tau; "
        f"{last['adopted']} updates adopted, {outlook['refused']} refused",
    ]
    if outlook["expected"] is not None:
        steps, tau, (low, high) = outlook["expected"]
        lines.append(f"twice the steps ({steps}) would bring about tau {tau:.2f} [{low:.2f}, {high:.2f}], by a fit")
    return lines
