"""The drafter that a run begins with, and its data; what fits no target is refused before anything is sampled."""

import torch
from accelerate import Accelerator
from torch import nn

from draftsmith.distill.targets import LoadedTarget
from draftsmith.distill.teacher import OnlineTeacher, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, DraftModel, TrainableDrafter
from draftsmith.heads.checkpoint import load_drafter, shared_vocabulary
from draftsmith.heads.lora import add_lora, check_lora
from draftsmith.heads.vocabulary import checked_size
from draftsmith.train.console import Console
from draftsmith.train.data import TrainingData, frequent_tokens, prepare_data
from draftsmith.train.placement import Placement
from draftsmith.train.recipe import Recipe


def data_and_drafter(
    recipe: Recipe, target: LoadedTarget, accelerator: Accelerator, placement: Placement, console: Console
) -> tuple[int, TrainingData, TrainableDrafter]:
    """(draft length, data, new drafter). With a draft vocabulary the drafter depends on the responses.

    The target is placed in between: drafters are made from whole layers, and are moved to where it then is.
    """
    model = target.model
    kind, options = HEADS[recipe.drafter.type], recipe.drafter_options()
    size = checked_size(recipe.draft_vocab_size, model.get_output_embeddings().weight.shape[0])
    if options.get("model") is not None:  # a draft model with another tokenizer would be trained in vain
        shared_vocabulary(options["model"], options["model"], target.tokenizer)
    torch.manual_seed(recipe.train.seed)
    # With a draft vocabulary this one is for its checks alone: which tokens it has is not known yet.
    any_tokens = {} if size is None else {"draft_vocabulary": list(range(size))}
    drafter = _started(recipe, target, kind.from_target(model, **options, **any_tokens))
    draft_length = recipe.draft_length(drafter.max_draft_length)
    check_target(recipe, model, drafter)
    placement.place(target)
    drafter.to(accelerator.device)
    data = prepare_data(recipe, target, drafter, accelerator, placement, console)
    if size is not None and recipe.start_from is None:
        torch.manual_seed(recipe.train.seed)
        drafter = kind.from_target(model, **options, draft_vocabulary=frequent_tokens(data.rows, size, target, console))
    return draft_length, data, drafter


def _started(recipe: Recipe, target: LoadedTarget, fresh: TrainableDrafter) -> TrainableDrafter:
    """The drafter that `start_from` names, once it is known to be what the recipe describes; else `fresh`."""
    if recipe.start_from is None:
        return fresh
    found = load_drafter(recipe.start_from, target.model, target.tokenizer)
    if not isinstance(found, type(fresh)):
        raise ConfigError(f"start_from={recipe.start_from} is a {found.type!r} drafter; expected {fresh.type!r}")
    found = found.float().train()
    options = recipe.drafter_options()
    if options.get("lora_rank") is not None:
        add_lora(found.model, rank=options["lora_rank"], alpha=options["lora_alpha"])
    there, wanted = ({name: tuple(p.shape) for name, p in it.named_parameters()} for it in (found, fresh))
    if there != wanted:
        name = min(key for key in {**there, **wanted} if there.get(key) != wanted.get(key))
        raise ConfigError(
            f"start_from={recipe.start_from}: {name} has shape {there.get(name)}; expected {wanted.get(name)}, as the "
            "section drafter says"
        )
    trained = {name: parameter.requires_grad for name, parameter in fresh.named_parameters()}
    for name, parameter in found.named_parameters():
        parameter.requires_grad_(trained[name])
    found.attach(target.model)
    return found


def check_target(recipe: Recipe, model: nn.Module, drafter: TrainableDrafter) -> None:
    """ConfigError where the target is not one that this recipe can be trained with."""
    OnlineTeacher(model, drafter.needs.layers)
    kind = model.config.model_type
    if recipe.teacher.kind == "cached" and model.config.is_encoder_decoder:
        raise ConfigError(f"teacher.kind='cached' with a target of model_type={kind!r}; expected 'online'")
    if recipe.data.pack:
        require_packable(model)
        if isinstance(drafter, DraftModel):
            require_packable(drafter.model, "drafter")
    if recipe.cotrain is not None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"cotrain with a target of model_type={kind!r}; expected a decoder-only one")
        check_lora(model, "cotrain", rank=recipe.cotrain.lora_rank, modules=recipe.cotrain.modules)
