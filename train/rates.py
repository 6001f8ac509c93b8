"""Optimizer and learning rate where a recipe names none; measured by benchmarks/rates.py, docs/distillation.md."""

from typing import NamedTuple

from transformers import PreTrainedConfig

from draftsmith.distill.embedded import EmbeddedRecipe
from draftsmith.distill.targets import EMBEDDED, load_tokenizer
from draftsmith.train.recipe import Recipe


class Rates(NamedTuple):
    """Peak learning rates for a target of width `WIDTH`."""

    muon: float
    adamw: float
    scaled: bool = False
    """Whether Muon's rate goes with 1/width as AdamW's does; else it is the same up to width `WIDEST`."""


WIDTH, WIDEST = 256, 512
RATES = {
    "draft_model": Rates(muon=3e-3, adamw=2e-3, scaled=True),
    "medusa": Rates(muon=2e-2, adamw=3e-3),
    "hydra": Rates(muon=2e-2, adamw=3e-3),
    "mlp_speculator": Rates(muon=2e-2, adamw=3e-3),
    "eagle": Rates(muon=2e-2, adamw=3e-3),
    "hass": Rates(muon=2e-2, adamw=3e-3),
    "eagle3": Rates(muon=2e-2, adamw=3e-3),
    "mtp": Rates(muon=2e-2, adamw=3e-3),
    "peagle": Rates(muon=2e-2, adamw=3e-3),
    "dflash": Rates(muon=2e-2, adamw=3e-3),
}
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
