"""Learning rates by step; optimizer and rate where a recipe names none (benchmarks/rates.py, docs/benchmarks.md).

A warning where the losses of a run's first steps show that its learning rate is far off.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from transformers import PreTrainedConfig

from draftsmith.distill.load_target import load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads.configs import DRAFTERS, Rates
from draftsmith.train.optimizers import SCHEDULES
from draftsmith.train.recipe import Recipe

WIDTH = 256
TRAINED = Rates(muon=1.5e-3, adamw=2.5e-4, scaled=True)
"""For drafters of any type that start from their own trained weights."""


def starts_trained(recipe: Recipe) -> bool:
    """Return whether the drafter starts from trained weights: a checkpoint, or a module of the target's checkpoint."""
    return recipe.start_from is not None or recipe.drafter.start == "trained"


def default_rate(recipe: Recipe, width: int) -> float | None:
    """Return the rate of the drafter's type and the recipe's optimizer for a target of hidden size `width`.

    Rates are proportional to 1/width. Muon's are constant up to `WIDTH` for drafters whose matrices all start
    untrained: there, the best rate was the same from width 64 on. On SmolLM2 (width 576) 2e-2 lets EAGLE, HASS and
    DFlash diverge, and EAGLE-3 is better at 6e-3. None for other optimizers.
    """
    rates = TRAINED if starts_trained(recipe) else DRAFTERS[recipe.drafter.type].rates
    shares = {"adamw": WIDTH / width, "muon": WIDTH / width if rates.scaled else min(1.0, WIDTH / width)}
    name = recipe.train.optimizer
    return float(f"{getattr(rates, name) * shares[name]:.1e}") if name in shares else None


def with_rate(recipe: Recipe) -> Recipe:
    """Return the recipe with the default rate where it has none, so that the stored recipe has one.

    Raises:
        ConfigError: for a target whose config cannot be read, or an optimizer without a default rate.
    """
    if recipe.train.learning_rate is not None:
        return recipe
    rate = default_rate(recipe, target_width(recipe))
    if rate is None:
        raise ConfigError(f"train.learning_rate is missing with train.optimizer={recipe.train.optimizer!r}")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": rate})})


def learning_rate(recipe: Recipe, step: int, end: int | None = None) -> float:
    """Return the rate of `step`, counted from 0: a linear warm-up to the peak, then the recipe's schedule.

    Args:
        end: the step after which 'wsd' ends, by default the recipe's last one.
    """
    settings, peak = recipe.train, recipe.peak_rate
    warmup = warmup_steps(recipe)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    decayed = max(0.0, 1 - ((end or settings.steps) - step) / decay_steps(recipe))
    return peak * SCHEDULES[settings.schedule].share(done, decayed)


def warmup_steps(recipe: Recipe) -> int:
    """Return the number of steps in which the rate rises."""
    return max(1, round(recipe.train.steps * recipe.train.warmup_fraction))


def decay_steps(recipe: Recipe) -> int:
    """Return the number of steps at the end of 'wsd' in which the rate falls."""
    return max(1, round(recipe.train.steps * recipe.train.decay_fraction))


def described(recipe: Recipe, width: int) -> str:
    """Return the first line of a run: optimizer, rate, schedule and batch size, and whether the rate is the default."""
    settings, default = recipe.train, default_rate(recipe, width)
    of = f"the default for {recipe.drafter.type}{' with trained weights' * starts_trained(recipe)} at width {width}"
    if default is None:
        of = "there is no default"
    elif settings.learning_rate != default:
        of += f" is {default:g}"
    schedule = SCHEDULES[settings.schedule].described.format(decay=decay_steps(recipe))
    return (
        f"optimizer: {settings.optimizer}, rate {settings.learning_rate:g} ({of}), {schedule}, {settings.batch_size} "
        "sequences a step"
    )


def _default_said(recipe: Recipe, width: int) -> str:
    rate = default_rate(recipe, width)
    return "there is no default" if rate is None else f"the default for this drafter is {rate:g}"


def target_width(recipe: Recipe) -> int:
    """Return the target's hidden size from its config, without loading the target."""
    settings = recipe.target
    _, config = load_tokenizer(settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    return width_of(config)


def width_of(config: PreTrainedConfig) -> int:
    """Return the hidden size of a target."""
    return config.get_text_config(decoder=True).hidden_size


SEQUENCES, LEAST = 40, 5
"""Sequences and steps in a window of losses at least, so that its mean varies by a few per cent between seeds."""
RISE, FALL = 2.0, 0.95
"""Bounds on the highest mean of half a window relative to the lowest before it, and on the last window's mean relative
to the first one's. At default rates losses rose by at most a fifth, and at a hundred times those rates to at least 3.8
times; untrained drafters' losses fell to at most 0.71, and to 0.99 at a thousandth of the rate (lab log)."""


def window(recipe: Recipe) -> int:
    """Return the number of steps in a window."""
    return max(LEAST, -(-SEQUENCES // recipe.train.batch_size))


def watched_steps(recipe: Recipe) -> int:
    """Return the step after which the rate is checked: the warm-up and four windows."""
    return round(recipe.train.steps * recipe.train.warmup_fraction) + 4 * window(recipe)


LAST, MOST, MARGIN = 8, 5, 0.2
"""A run diverges if the losses of `MOST` of its `LAST` steps exceed that of the first step by this share, which is
larger for batches of fewer than `LAST` sequences, as their losses vary more."""


def divergence_warning(recipe: Recipe, losses: Sequence[float], width: int) -> str | None:
    """Return a warning if most of the last losses are above that of the first step; None otherwise.

    A run that diverges from its first steps is warned of after the sixth step at the earliest. Losses that are not
    positive are not judged.
    """
    if not losses or min(losses) <= 0:
        return None
    limit = losses[0] * (1 + MARGIN * max(1.0, math.sqrt(LAST / recipe.train.batch_size)))
    above = sum(loss > limit for loss in losses[1:][-LAST:])
    if above < MOST:
        return None
    return (
        f"train.learning_rate={recipe.peak_rate:g} is probably far too high: {above} of the last {LAST} losses are "
        f"above the first one ({max(losses[-LAST:]):.3g} instead of {losses[0]:.3g}); {_default_said(recipe, width)}"
    )


def rate_warning(recipe: Recipe, losses: Sequence[float], width: int) -> str | None:
    """Return a warning if the losses of the first `watched_steps` show a rate that is far off; None otherwise.

    A drafter that starts from trained weights, its own or the target's, may have little left to learn, so its rate is
    never too low. Losses that are not positive are not judged.
    """
    size, rate = window(recipe), recipe.peak_rate
    if len(losses) < 2 * size or min(losses) <= 0:
        return None
    first, last = sum(losses[:size]) / size, sum(losses[-size:]) / size
    short = size // 2 + 1
    means = [losses[0], *(sum(losses[start : start + short]) / short for start in range(1, len(losses) - short + 1))]
    lowest = accumulate(means, min)
    rise, low, high = max((mean / least, least, mean) for mean, least in zip(means, lowest, strict=True))
    default = _default_said(recipe, width)
    if rise > RISE:
        return (
            f"train.learning_rate={rate:g} is probably far too high: the loss rose from {low:.3g} to {high:.3g} within "
            f"the first {len(losses)} steps; {default}"
        )
    untrained = not starts_trained(recipe) and recipe.drafter.start == "untrained"
    if last > FALL * first and untrained:
        return (
            f"train.learning_rate={rate:g} is probably far too low: the loss went from {first:.3g} to "
            f"{last:.3g} within the first {len(losses)} steps; {default}"
        )
    return None


def judge_rate(recipe: Recipe, losses: Sequence[float], step: int, width: int) -> str | None:
    """Return a warning where the losses of the first `step` steps show a rate that is far off; None otherwise."""
    if recipe.continue_from is not None:
        return None
    warning = divergence_warning(recipe, losses, width)
    return rate_warning(recipe, losses, width) if warning is None and step == watched_steps(recipe) else warning
