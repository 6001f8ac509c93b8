"""What a run trains, put together: drafter, objective and teacher as one module, its optimizers, adapters."""

from dataclasses import fields

import torch
from torch import nn

from draftsmith.distill.cotraining import Adapters
from draftsmith.distill.objectives import Objective
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.blocks import recompute_activations
from draftsmith.train.launching import precision
from draftsmith.train.optimizers import optimizers
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import AgreementStep, CotrainSettings, CotrainStep, Teacher

Assembly = tuple[AgreementStep, list[torch.optim.Optimizer], Adapters | None]


def step_and_optimizers(recipe: Recipe, target: nn.Module, drafter: TrainableDrafter, teacher: Teacher) -> Assembly:
    """The module that is trained and its optimizers, with adapters on the target where the recipe wants them."""
    settings, together = recipe.train, recipe.cotrain
    objective = Objective(**recipe.objective_options(recipe.draft_length(drafter.max_draft_length)))
    if settings.activation_checkpointing:
        recompute_activations(drafter)
    dtype = torch.bfloat16 if precision(recipe) == "bf16" else torch.float32
    if together is None:
        step = AgreementStep(drafter, objective, teacher)
        return step, optimizers(drafter, settings.optimizer, settings.weight_decay, dtype=dtype), None
    torch.manual_seed(settings.seed)
    sizes = {"rank": together.lora_rank, "alpha": together.lora_alpha, "modules": together.modules}
    adapters = Adapters.on(target, **sizes)
    if settings.activation_checkpointing:
        recompute_activations(target)
    rest = {field.name: getattr(together, field.name) for field in fields(CotrainSettings)}
    step = CotrainStep(drafter, objective, teacher, adapters, CotrainSettings(**rest))
    ratio = together.learning_rate_ratio
    made = optimizers(drafter, settings.optimizer, settings.weight_decay, step.adapters, ratio, dtype)
    return step, made, adapters
