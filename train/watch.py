"""A warning where a run's first steps say that its learning rate is far off."""

from collections.abc import Sequence
from itertools import accumulate

from draftsmith.train.rates import default_rate, starts_trained
from draftsmith.train.recipe import Recipe

SEQUENCES, LEAST = 40, 5
"""A window of losses holds so many sequences and so many steps, so that chance moves its mean by a few per cent."""
RISE, FALL = 2.0, 0.95
"""The highest mean of half a window over the lowest before it, and the last window's mean over the first one's. At the
default rates losses rose by a fifth at most, at a hundred times them to 3.8 times as much and more; untrained
drafters' losses fell to 0.71 and less, and to 0.99 at a thousandth of the rate (docs/distillation.md)."""


def window(recipe: Recipe) -> int:
    return max(LEAST, -(-SEQUENCES // recipe.train.batch_size))


def watched_steps(recipe: Recipe) -> int:
    """Steps after which the rate is judged: the warm-up and four windows."""
    return round(recipe.train.steps * recipe.train.warmup_fraction) + 4 * window(recipe)


def rate_warning(recipe: Recipe, losses: Sequence[float], width: int) -> str | None:
    """What the losses of the first `watched_steps` say of the rate; None where nothing is wrong.

    A drafter that starts from trained weights, its own or the target's, may have little left to learn: it is not told
    that it is slow. Losses that are not positive have no scale.
    """
    size, rate = window(recipe), recipe.train.learning_rate
    if len(losses) < 2 * size or min(losses) <= 0:
        return None
    first, last = sum(losses[:size]) / size, sum(losses[-size:]) / size
    short = size // 2 + 1
    means = [losses[0], *(sum(losses[start : start + short]) / short for start in range(1, len(losses) - short + 1))]
    lowest = accumulate(means, min)
    rise, low, high = max((mean / least, least, mean) for mean, least in zip(means, lowest, strict=True))
    default = f"the default for this drafter is {default_rate(recipe, width):g}"
    if rise > RISE:
        return (
            f"train.learning_rate={rate:g} is probably far too high: the loss rose from {low:.3g} to {high:.3g} within "
            f"the first {len(losses)} steps; {default}"
        )
    untrained = not starts_trained(recipe) and recipe.drafter_options().get("init") != "target_layers"
    if last > FALL * first and untrained:
        return (
            f"train.learning_rate={rate:g} is probably far too low: the loss went from {first:.3g} to "
            f"{last:.3g} within the first {len(losses)} steps; {default}"
        )
    return None
