"""The drafter that a run begins with, and its data; what fits no target is refused before anything is sampled.

The run's teacher: the target in the loop, its states from the cache, which is completed first, or a file.

What a run trains, put together: drafter, objective and teacher as one module, its optimizers, adapters.

The optimizers of a run: AdamW for everything, or Muon for the matrices and AdamW for the rest.

A drafter's blocks: the parts whose activations may be forgotten, and which torch.compile is worth it for.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from functools import wraps
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from draftsmith.distill.cotraining import Adapters
from draftsmith.distill.hidden_state_cache import CachedTeacher, SignalCache
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.logprob_teacher import LogprobTeacher, require_reads_text_alone
from draftsmith.distill.muon import Muon
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter, shared_vocabulary
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_vocab import checked_size
from draftsmith.heads.hidden_states import layer_lists
from draftsmith.heads.hydra import HydraHead
from draftsmith.heads.lora import add_lora, check_lora
from draftsmith.heads.medusa import ResidualBlock
from draftsmith.heads.mlp_speculator import SpeculatorStep
from draftsmith.locks import hold_cache
from draftsmith.train.accelerator import autocast, precision
from draftsmith.train.data import TrainingData, frequent_tokens, prepare_data
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import AgreementStep, CotrainSettings, CotrainStep, Teacher
from draftsmith.train.target_placement import Placement

OWN = (LlamaMLP, HydraHead, ResidualBlock, SpeculatorStep)
"""Of the drafters with layers of their own. Attention is none: it remembers the keys of earlier steps, which would be
remembered twice, and that memory cannot be given back."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model, or the outermost blocks of a drafter."""
    if isinstance(model, DraftModel):
        model = model.model
    if isinstance(model, PreTrainedModel):
        return [layer for name in layer_lists(model) for layer in model.get_submodule(name)]
    found = {name: module for name, module in model.named_modules() if isinstance(module, OWN)}
    return [block for name, block in found.items() if not any(name.startswith(f"{other}.") for other in found)]


def recompute_activations(model: nn.Module) -> None:
    """Keep only what goes into each block for the backward pass (Chen et al. 2016, arXiv:1604.06174): less memory, one
    more forward pass of the blocks, the same gradients."""
    for block in blocks_of(model):
        block.forward = _recomputed(block.forward)


def compile_blocks(model: nn.Module) -> None:
    """Let torch.compile make kernels of each block, for any batch and length, when it first runs."""
    for block in blocks_of(model):
        block.compile(dynamic=True)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return again


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


BETAS = (0.9, 0.95)


def optimizers(
    drafter: nn.Module,
    kind: str,
    weight_decay: float,
    adapters: nn.ParameterList | None = None,
    ratio: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[torch.optim.Optimizer]:
    """With a rate of 0 until the first step sets it; `kind` is the recipe's `train.optimizer`.

    `adapters` on the target are AdamW's, at `ratio` times the drafter's rate: the group says so as `ratio`. `dtype` is
    that of Muon's matrix products.

    Muon takes the matrices inside the layers; the rest stays AdamW's, as its authors advise.
    """
    trained = {name: weight for name, weight in drafter.named_parameters() if weight.requires_grad}
    matrices = [weight for name, weight in trained.items() if kind == "muon" and weight.ndim == 2 and _inside(name)]
    taken = {id(weight) for weight in matrices}
    rest = [weight for weight in trained.values() if id(weight) not in taken]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, lr=0.0, weight_decay=weight_decay, dtype=dtype))
    if adapters is not None:
        group = {"params": list(adapters), "ratio": ratio}
        made.append(torch.optim.AdamW([group], lr=0.0, betas=BETAS, weight_decay=0.0))
    if rest:
        made.append(torch.optim.AdamW(rest, lr=0.0, betas=BETAS, weight_decay=weight_decay))
    return made


def _inside(name: str) -> bool:
    return not any(part in name for part in ("lm_head", "embed", "wte", "wpe", "markov", "confidence"))


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


def make_teacher(
    recipe: Recipe,
    target: nn.Module,
    drafter: Drafter,
    rows: Dataset,
    accelerator: Accelerator,
    placement: Placement,
    console: Console,
) -> Teacher:
    """Every process builds its share of the shards that are missing; the others wait for it."""
    if recipe.teacher.kind == "logprobs":
        require_reads_text_alone(drafter)
        return LogprobTeacher(target, rows)
    online, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    if settings.kind == "online":
        return online
    cache = SignalCache(target, rows, drafter.needs.layers, settings.dtype, shard_rows=settings.shard_rows)
    with ExitStack() as held:
        missing, problems = cache.missing() if accelerator.is_main_process else ([], [])
        if missing:
            held.enter_context(hold_cache(cache.folder))
            missing, problems = cache.missing()  # another run may have built some since
        for problem in problems:
            console.say(problem)
        missing = broadcast_object_list([missing])[0]
        share = missing[accelerator.process_index :: accelerator.num_processes]
        if missing:
            with console.bar("teacher cache", len(share), 0) as advance, autocast(recipe, accelerator.device):
                cache.build(share, online, lambda: advance({}))
        placement.meet()
    console.say(
        f"teacher cache: {sum(cache.lengths)} tokens at {cache.bytes_a_token():.0f} bytes each in {cache.folder}; "
        f"{len(missing)} of {cache.shards} shards were built now"
    )
    return CachedTeacher(online, cache)
