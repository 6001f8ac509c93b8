"""Optimizer and learning rate where a recipe names none; measured by benchmarks/rates.py, docs/benchmarks.md.

A warning where a run's first steps say that its learning rate is far off.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedConfig

from draftsmith.distill.embedded import EmbeddedRecipe
from draftsmith.distill.load_target import EMBEDDED, load_tokenizer
from draftsmith.heads.configs import DRAFTERS
from draftsmith.train.recipe import Recipe


class Rates(NamedTuple):
    """Peak learning rates for a target of width `WIDTH`."""

    muon: float
    adamw: float
    scaled: bool = False
    """Whether Muon's rate goes with 1/width as AdamW's does; else it is the same up to width `WIDEST`."""


WIDTH, WIDEST = 256, 512
RATES = dict.fromkeys(DRAFTERS, Rates(muon=2e-2, adamw=3e-3))
RATES["draft_model"] = Rates(muon=3e-3, adamw=2e-3, scaled=True)
TRAINED = Rates(muon=1.5e-3, adamw=2.5e-4, scaled=True)
"""For drafters that start from trained weights of their own, whatever the family."""


def starts_trained(recipe: Recipe) -> bool:
    """Whether the drafter has been trained before the run: a checkpoint, or a module that the target brings."""
    options = recipe.drafter_options()
    return recipe.start_from is not None or options.get("model") is not None or options.get("init") == "native"


def default_rate(recipe: Recipe, width: int) -> float:
    """The family's rate for the recipe's optimizer on a target of this width.

    AdamW's goes with 1/width. Muon's was the same from width 64 to `WIDEST`, the widest that was measured, where all
    matrices inside the layers begin untrained; beyond, it goes with 1/width as a precaution.
    """
    rates = TRAINED if starts_trained(recipe) else RATES[recipe.drafter.type]
    if recipe.train.optimizer == "adamw":
        value = rates.adamw * WIDTH / width
    else:
        value = rates.muon * (WIDTH / width if rates.scaled else min(1.0, WIDEST / width))
    return float(f"{value:.1e}")


def with_rate(recipe: Recipe) -> Recipe:
    """The recipe with the default rate where it has none, so that what is stored and resumed names it.

    Raises:
        ConfigError: for a target whose config cannot be read.
    """
    if recipe.train.learning_rate is not None:
        return recipe
    rate = default_rate(recipe, target_width(recipe))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": rate})})


def described(recipe: Recipe, width: int) -> str:
    """The line that a run begins with: optimizer, rate, schedule and batch, and whether the rate is the default."""
    settings, default = recipe.train, default_rate(recipe, width)
    of = f"the default for {recipe.drafter.type}{' that is trained' * starts_trained(recipe)} at width {width}"
    return (
        f"optimizer: {settings.optimizer}, rate {settings.learning_rate:g} "
        f"({of}{'' if settings.learning_rate == default else f' is {default:g}'}), "
        f"cosine to a tenth, {settings.batch_size} sequences a step"
    )


def target_width(recipe: Recipe) -> int:
    """From the target's config, before it is loaded; the embedded target is not built for it."""
    settings = recipe.target
    if settings.model == EMBEDDED:
        return EmbeddedRecipe().hidden_size
    options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
    return width_of(load_tokenizer(settings.model, **options)[1])


def width_of(config: PreTrainedConfig) -> int:
    return config.get_text_config(decoder=True).hidden_size


SEQUENCES, LEAST = 40, 5
"""A window of losses holds so many sequences and so many steps, so that chance moves its mean by a few per cent."""
RISE, FALL = 2.0, 0.95
"""The highest mean of half a window over the lowest before it, and the last window's mean over the first one's. At the
default rates losses rose by a fifth at most, at a hundred times them to 3.8 times as much and more; untrained
drafters' losses fell to 0.71 and less, and to 0.99 at a thousandth of the rate (docs/training.md)."""


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
