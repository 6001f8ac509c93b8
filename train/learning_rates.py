"""Learning rates by step; optimizer and rate where a recipe names none (benchmarks/rates.py, docs/benchmarks.md).

A warning where the losses of a run's first steps show that its learning rate is far off.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedConfig

from draftsmith.distill.load_target import load_tokenizer
from draftsmith.heads.configs import DRAFTERS
from draftsmith.train.recipe import Recipe


class Rates(NamedTuple):
    """Peak learning rates for a target of width `WIDTH`."""

    muon: float
    adamw: float
    scaled: bool = False
    """Whether Muon's rate is proportional to 1/width, as AdamW's is; otherwise it is constant up to width `WIDEST`."""


WIDTH, WIDEST = 256, 512
RATES = dict.fromkeys(DRAFTERS, Rates(muon=2e-2, adamw=3e-3))
RATES["draft_model"] = Rates(muon=3e-3, adamw=2e-3, scaled=True)
TRAINED = Rates(muon=1.5e-3, adamw=2.5e-4, scaled=True)
"""For drafters of any type that start from their own trained weights."""


def starts_trained(recipe: Recipe) -> bool:
    """Return whether the drafter starts from trained weights: a checkpoint, or a module of the target's checkpoint."""
    options = recipe.drafter_options()
    return recipe.start_from is not None or options.get("model") is not None or options.get("init") == "native"


def default_rate(recipe: Recipe, width: int) -> float:
    """Return the rate of the drafter's type and the recipe's optimizer for a target of hidden size `width`.

    AdamW's rate is proportional to 1/width. Muon's best rate was the same from width 64 to `WIDEST`, the largest one
    measured, for drafters whose matrices all start untrained; above, 1/width is a precaution.
    """
    return scaled_rate(TRAINED if starts_trained(recipe) else RATES[recipe.drafter.type], recipe.train.optimizer, width)


def scaled_rate(rates: Rates, optimizer: str, width: int) -> float:
    """Return the rate of an optimizer for a target of hidden size `width`; see `default_rate`."""
    if optimizer == "adamw":
        value = rates.adamw * WIDTH / width
    else:
        value = rates.muon * (WIDTH / width if rates.scaled else min(1.0, WIDEST / width))
    return float(f"{value:.1e}")


def with_rate(recipe: Recipe) -> Recipe:
    """Return the recipe with the default rate where it has none, so that the stored recipe has one.

    Raises:
        ConfigError: for a target whose config cannot be read.
    """
    if recipe.train.learning_rate is not None:
        return recipe
    rate = default_rate(recipe, target_width(recipe))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": rate})})


def learning_rate(recipe: Recipe, step: int, end: int | None = None) -> float:
    """Return the rate of `step`, counted from 0: a linear warm-up to the peak, then the recipe's schedule.

    'wsd' decays from the peak to zero as 1 - sqrt (Hägele et al. 2024, arXiv:2405.18392, section 3).

    Args:
        end: the step after which 'wsd' ends, by default the recipe's last one.
    """
    settings, peak = recipe.train, recipe.peak_rate
    warmup = warmup_steps(recipe)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    decay = decay_steps(recipe)
    decayed = max(0.0, 1 - ((end or settings.steps) - step) / decay)
    shares = {
        "cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": 1 - math.sqrt(decayed),
        "constant": 1.0,
    }
    return peak * shares[settings.schedule]


def warmup_steps(recipe: Recipe) -> int:
    """Return the number of steps in which the rate rises."""
    return max(1, round(recipe.train.steps * recipe.train.warmup_fraction))


def decay_steps(recipe: Recipe) -> int:
    """Return the number of steps at the end of 'wsd' in which the rate falls."""
    return max(1, round(recipe.train.steps * recipe.train.decay_fraction))


SCHEDULES = {
    "cosine": "cosine to a tenth",
    "linear": "linear to zero",
    "wsd": "constant, over the last {decay} steps to zero",
    "constant": "constant",
}


def described(recipe: Recipe, width: int) -> str:
    """Return the first line of a run: optimizer, rate, schedule and batch size, and whether the rate is the default."""
    settings, default = recipe.train, default_rate(recipe, width)
    of = f"the default for {recipe.drafter.type}{' with trained weights' * starts_trained(recipe)} at width {width}"
    return (
        f"optimizer: {settings.optimizer}, rate {settings.learning_rate:g} "
        f"({of}{'' if settings.learning_rate == default else f' is {default:g}'}), "
        f"{SCHEDULES[settings.schedule].format(decay=decay_steps(recipe))}, {settings.batch_size} sequences a step"
    )


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
        f"above the first one ({max(losses[-LAST:]):.3g} instead of {losses[0]:.3g}); the default for this drafter is "
        f"{default_rate(recipe, width):g}"
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
