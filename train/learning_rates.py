"""Learning rates by step; optimizer and rate where a recipe names none (benchmarks/rates.py, docs/benchmarks.md)."""

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


def target_width(recipe: Recipe) -> int:
    """Return the target's hidden size from its config, without loading the target."""
    settings = recipe.target
    _, config = load_tokenizer(settings.model, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    return width_of(config)


def width_of(config: PreTrainedConfig) -> int:
    """Return the hidden size of a target."""
    return config.get_text_config(decoder=True).hidden_size
