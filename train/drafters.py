"""The drafter that a run begins with, and its data; what fits no target is refused before anything is sampled."""

import torch
from accelerate import Accelerator
from torch import nn

from draftsmith.distill.targets import LoadedTarget
from draftsmith.distill.teacher import OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.checkpoint import shared_vocabulary
from draftsmith.heads.lora import check_lora
from draftsmith.heads.vocabulary import checked_size
from draftsmith.train.console import Console
from draftsmith.train.data import TrainingData, frequent_tokens, prepare_data
from draftsmith.train.recipe import Recipe


def data_and_drafter(
    recipe: Recipe, target: LoadedTarget, accelerator: Accelerator, console: Console
) -> tuple[int, TrainingData, TrainableDrafter]:
    """(draft length, data, new drafter). With a draft vocabulary the drafter depends on the responses."""
    model = target.model
    kind, options = HEADS[recipe.drafter.type], recipe.drafter_options()
    size = checked_size(recipe.draft_vocab_size, model.get_output_embeddings().weight.shape[0])
    if options.get("model") is not None:  # a draft model with another tokenizer would be trained in vain
        shared_vocabulary(options["model"], options["model"], target.tokenizer)
    torch.manual_seed(recipe.train.seed)
    # With a draft vocabulary this one is for its checks alone: which tokens it has is not known yet.
    any_tokens = {} if size is None else {"draft_vocabulary": list(range(size))}
    drafter = kind.from_target(model, **options, **any_tokens)
    draft_length = recipe.draft_length(drafter.max_draft_length)
    _check_target(recipe, model, drafter)
    with accelerator.main_process_first():
        data = prepare_data(recipe, target, console)
    if size is not None:
        torch.manual_seed(recipe.train.seed)
        drafter = kind.from_target(model, **options, draft_vocabulary=frequent_tokens(data.rows, size, target))
    return draft_length, data, drafter


def _check_target(recipe: Recipe, model: nn.Module, drafter: TrainableDrafter) -> None:
    """ConfigError where the target is not one that this recipe can be trained with."""
    OnlineTeacher(model, drafter.needs.layers)
    kind = model.config.model_type
    if recipe.teacher.kind == "cached" and model.config.is_encoder_decoder:
        raise ConfigError(f"teacher.kind='cached' with a target of model_type={kind!r}; expected 'online'")
    if recipe.cotrain is not None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"cotrain with a target of model_type={kind!r}; expected a decoder-only one")
        check_lora(model, "cotrain", rank=recipe.cotrain.lora_rank, modules=recipe.cotrain.modules)
