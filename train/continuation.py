"""The drafter that `start_from` names: the recipe's section `drafter` is read from it, and training continues it."""

from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.config import section_of
from draftsmith.distill.load_target import DTYPES, LoadedTarget, decoder_class, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.checkpoint import load_drafter, unattached_drafter
from draftsmith.heads.configs import DRAFTERS, DrafterSection, is_named
from draftsmith.train.recipe import Recipe
from draftsmith.train.training_data import ends_of


def target_of(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a frozen target from its config, in the recipe's dtype."""
    decoder = decoder_class(config, recipe.data.images is not None)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else decoder
    model = auto.from_config(config, dtype=DTYPES[recipe.target.dtype])
    model.eval().requires_grad_(False)
    return model


def with_section(recipe: Recipe) -> Recipe:
    """Return the recipe with the options of the drafter that `start_from` names in its section `drafter`.

    Only the target's config is loaded. Drafters without a checkpoint, such as native-mtp, have the section's options.

    Raises:
        ConfigError: for a drafter that does not fit the target, or a key of the section that contradicts it.
    """
    settings, source = recipe.target, recipe.start_from
    if source is None or is_named(source):
        return recipe
    trusted = settings.trust_remote_code
    tokenizer, config = load_tokenizer(settings.model, revision=settings.revision, trust_remote_code=trusted)
    stored = stored_drafter(recipe, config, tokenizer)
    check_section(recipe, stored)
    kind = DRAFTERS[recipe.drafter.type or stored.type].section
    described = {name: value for name, value in stored.section().items() if name in kind.model_fields}
    # Whether the mask was trained shows beside the target's weights; a recipe has one window for all layers.
    unknown = ("mask_token", "window") if isinstance(described.get("window"), list) else ("mask_token",)
    described = {name: value for name, value in described.items() if name not in unknown}
    values = {"type": recipe.drafter.type or stored.type, **described, **_given(recipe.drafter)}
    section = section_of(kind, lambda path: ".".join(map(str, ("drafter", *path))), values)
    return recipe.model_copy(update={"drafter": section})


def stored_drafter(
    recipe: Recipe, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> TrainableDrafter:
    """Return the drafter that `start_from` names, not attached to a target; `config` is the target's."""
    assert recipe.start_from is not None, "the recipe names a drafter"
    with torch.device("meta"):
        target = target_of(recipe, config)
    return unattached_drafter(recipe.start_from, target, tokenizer)


def check_section(recipe: Recipe, stored: TrainableDrafter) -> None:
    """Raise ConfigError for a key of the section `drafter` that contradicts the drafter that `start_from` names."""
    kind, place = recipe.drafter.type, f"as start_from={recipe.start_from} has"
    if kind is not None and not isinstance(stored, HEADS[kind]):
        raise ConfigError(f"drafter.type={kind!r}; expected {stored.type!r}, {place}")
    own = stored.section()
    for name, value in _given(recipe.drafter).items():
        if name in own and name not in stored.training_options and value is not None and own[name] != value:
            raise ConfigError(f"drafter.{name}={value!r}; expected {own[name]!r}, {place} (or leave the key out)")


def _given(section: DrafterSection) -> dict[str, Any]:
    """Return the options that the recipe's section sets."""
    return section.model_dump(include=section.model_fields_set - {"type"})


def started(recipe: Recipe, source: str, target: LoadedTarget) -> TrainableDrafter:
    """Return the drafter `source`, ready to be trained further. Options that the recipe leaves out are its own.

    Raises:
        ConfigError: for a drafter that does not fit the target or the section `drafter`.
    """
    trained = load_drafter(source, target.model, target.tokenizer)
    if not isinstance(trained, TrainableDrafter):
        raise ConfigError(f"start_from={source} is a {trained.type!r} drafter; expected one with weights")
    check_section(recipe, trained)
    vocabulary, ends = trained.draft_vocabulary, ends_of(target)
    if vocabulary is not None and ends and ends.isdisjoint(vocabulary.tokens_D.tolist()):
        raise ConfigError(
            f"start_from={source}: a draft vocabulary without EOS ({min(ends)}): no draft ends a text; expected one "
            "with it"
        )
    trained = trained.float().train()
    trained.unfreeze()
    trained.train_further(**_given(recipe.drafter))
    trained.attach(target.model)
    return trained
