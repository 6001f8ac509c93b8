"""Build what a run trains from its `RunContext`: target, drafter and data, teacher, optimizers and engine."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from draftsmith.distill.cotraining import Adapters
from draftsmith.distill.load_target import LoadedTarget, load_processor, load_target, load_tokenizer
from draftsmith.distill.objective import Objective
from draftsmith.distill.quantization import quantized_matrices
from draftsmith.distill.state_files import FileStates
from draftsmith.distill.teacher import OnlineTeacher, measure_flat_rows, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter, shared_vocabulary
from draftsmith.heads.draft_vocab import checked_size
from draftsmith.heads.flat_rows import again_reading, read_flat
from draftsmith.heads.hidden_states import layer_lists
from draftsmith.heads.lm_head import logits_map
from draftsmith.heads.lora import add_lora, check_lora
from draftsmith.locks import hold_cache
from draftsmith.train.accelerator import autocast, precision
from draftsmith.train.context import RunContext
from draftsmith.train.data import TrainingData, frequent_tokens, logit_count, prepare_data
from draftsmith.train.engine import Engine, Optimizers, TorchEngine
from draftsmith.train.optimizers import Sizes, optimizers
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import AgreementStep, CotrainSettings, CotrainStep, Teacher

if TYPE_CHECKING:
    from draftsmith.heads.sequence_part import SequencePart


def load_frozen_target(context: RunContext) -> LoadedTarget:
    """Load the recipe's target to the device from which `Placement.place` distributes it."""
    settings, accelerator = context.recipe.target, context.accelerator
    images, together = context.recipe.data.images is not None, settings.tensor_parallel
    divided = f", divided among {together} processes" if together > 1 else ""
    context.console.say(f"  target: loading {settings.model}{divided}")
    with accelerator.main_process_first():  # a download happens once
        options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        processor = load_processor(settings.model, **options) if images else None
        if together == 1:
            loaded = _load(context, images=images)
            if (note := loaded.dtype_note("target.dtype=bfloat16")) is not None:
                context.console.say(note)
            return replace(loaded, processor=processor)
        load_tokenizer(settings.model, **options)
    return _load(context, images=images, tensor_parallel=together)  # all processes at once: each reads its part


def _load(context: RunContext, **options: Any) -> LoadedTarget:
    """Load the recipe's target to the device from which it is placed; `options`: more of `load_target`."""
    settings = context.recipe.target
    return load_target(
        settings.model,
        revision=settings.revision,
        dtype=settings.dtype,
        attn_implementation=settings.attn_implementation,
        trust_remote_code=settings.trust_remote_code,
        device=context.placement.load_to,
        **options,
    )


class DataAndDrafter(NamedTuple):
    """The training data, and the new drafter, which with a draft vocabulary depends on the responses."""

    draft_length: int
    data: TrainingData
    drafter: TrainableDrafter
    quantization: dict[str, float] | None
    """Memory and alpha of the quantized target, see `quantized_target.py`; None where it is not quantized."""


def data_and_drafter(context: RunContext, target: LoadedTarget) -> DataAndDrafter:
    """Build the drafter and prepare the data; a drafter that does not fit the target is refused before sampling.

    The target is placed in between: drafters are made from whole layers, and move to the target's device.

    Raises:
        ConfigError: for a drafter, a teacher or adapters that do not fit the target, and for data that cannot be used.
    """
    recipe, model = context.recipe, target.model
    kind, options = HEADS[recipe.drafter.type], recipe.drafter_options()
    size = checked_size(recipe.draft_vocab_size, logit_count(model))
    if options.get("model") is not None:  # training a draft model with another tokenizer would be in vain
        shared_vocabulary(options["model"], options["model"], target.tokenizer)
    torch.manual_seed(recipe.train.seed)
    # With a draft vocabulary this drafter is only for the checks: its tokens are not known yet.
    any_tokens = {} if size is None else {"draft_vocabulary": list(range(size))}
    drafter = _started(recipe, target, kind.from_target(model, **options, **any_tokens))
    draft_length = recipe.draft_length(drafter.max_draft_length)
    check_target(recipe, model, drafter)
    context.placement.place(target)
    drafter.to(context.accelerator.device)
    data = prepare_data(context, target, drafter)
    quantization = None
    if recipe.target.quantization is not None:
        from draftsmith.train.quantized_target import quantization_effect

        quantization = quantization_effect(context, target, data.rows, partial(_load, context))
    if size is not None and recipe.start_from is None:
        torch.manual_seed(recipe.train.seed)
        tokens = frequent_tokens(data.rows.select(range(data.trained)), size, target, context.console)
        drafter = kind.from_target(model, **options, draft_vocabulary=tokens)
    return DataAndDrafter(draft_length, data, drafter, quantization)


TRAINING_ONLY = ("anchors", "train_steps")
"""Options of drafters that change how they are trained, not what they compute."""


def _started(recipe: Recipe, target: LoadedTarget, fresh: TrainableDrafter) -> TrainableDrafter:
    """Return the drafter that `start_from` names, if it is as the recipe says; without one, `fresh`.

    Options that the recipe leaves out are the drafter's own.
    """
    if recipe.start_from is None:
        return fresh
    trained = load_drafter(recipe.start_from, target.model, target.tokenizer)
    if not isinstance(trained, TrainableDrafter) or not isinstance(trained, type(fresh)):
        raise ConfigError(f"start_from={recipe.start_from} is a {trained.type!r} drafter; expected {fresh.type!r}")
    trained = trained.float().train()
    options = recipe.drafter_options()
    if options.get("lora_rank") is not None:
        add_lora(trained.get_submodule("model"), rank=options["lora_rank"], alpha=options["lora_alpha"])
    stored = trained.config()
    shapes, expected = ({name: tuple(p.shape) for name, p in it.named_parameters()} for it in (trained, fresh))
    if shapes != expected:
        name = min(key for key in {**shapes, **expected} if shapes.get(key) != expected.get(key))
        said, named = fresh.config(), (stored.keys() & options.keys()) - {*TRAINING_ONLY}
        others = ", ".join(f"{key}={stored[key]!r}" for key in sorted(named) if stored[key] != said.get(key))
        raise ConfigError(
            f"start_from={recipe.start_from}: {name} has shape {shapes.get(name)}; expected {expected.get(name)}, as "
            "the section drafter says" + (f" (the drafter has {others})" if others else "")
        )
    for key in sorted(recipe.drafter.model_fields_set & stored.keys() & options.keys()):
        if key in TRAINING_ONLY:
            setattr(trained, key, options[key])
        elif options[key] is not None and stored[key] != options[key]:
            raise ConfigError(
                f"start_from={recipe.start_from}: {key}={stored[key]!r}; expected {options[key]!r}, as the section "
                "drafter says (leave the key out to keep the drafter's own)"
            )
    requires_grad = {name: parameter.requires_grad for name, parameter in fresh.named_parameters()}
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(requires_grad[name])
    trained.attach(target.model)
    return trained


def check_target(recipe: Recipe, model: PreTrainedModel, drafter: TrainableDrafter) -> None:
    """Raise ConfigError for a target or draft model that teacher, objective, packing or co-training do not support."""
    from draftsmith.heads.draft_model import DraftModel

    OnlineTeacher(model, drafter.needs.layers)
    if isinstance(drafter, DraftModel):
        logits_map(drafter.model)  # measured while an engine has not sharded it
        measure_flat_rows(drafter.model)
    kind = model.config.model_type
    if recipe.teacher.kind in ("cached", "files") and model.config.is_encoder_decoder:
        raise ConfigError(
            f"teacher.kind={recipe.teacher.kind!r} with a target of model_type={kind!r}; expected 'online'"
        )
    if recipe.data.server is not None and model.config.is_encoder_decoder:
        raise ConfigError(f"data.server with a target of model_type={kind!r}; expected a decoder-only one")
    if recipe.target.quantization is not None:
        quantized_matrices(model, recipe.target.quantization)
    if recipe.train.sequence_parallel > 1:
        _require_divided_text(recipe, drafter)
    if recipe.data.pack:
        require_packable(model)
        if isinstance(drafter, DraftModel):
            require_packable(drafter.model, "drafter")
    if recipe.cotrain is not None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"cotrain with a target of model_type={kind!r}; expected a decoder-only one")
        check_lora(model, "cotrain", rank=recipe.cotrain.lora_rank, modules=recipe.cotrain.modules)


def _require_divided_text(recipe: Recipe, drafter: TrainableDrafter) -> None:
    from draftsmith.heads.eagle import Eagle
    from draftsmith.heads.eagle3 import Eagle3
    from draftsmith.heads.layers import windows_of

    refusal = f"train.sequence_parallel={recipe.train.sequence_parallel} with drafter.type={recipe.drafter.type!r}"
    if not isinstance(drafter, Eagle | Eagle3):
        raise ConfigError(f"{refusal}; expected eagle, hass or eagle3")
    if any(window is not None for window in windows_of(drafter.body.config)):
        raise ConfigError(f"{refusal} and a sliding window; expected 1")


def sequence_part(context: RunContext) -> "SequencePart | None":
    """Return this process's part of each text; None where every process trains on texts of its own."""
    from draftsmith.heads.sequence_part import SequencePart

    count, accelerator = context.recipe.train.sequence_parallel, context.accelerator
    if count == 1:
        return None
    shape = (accelerator.num_processes // count, count)
    mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("texts", "parts"))
    return SequencePart(accelerator.process_index % count, count, mesh["parts"].get_group())


def make_teacher(context: RunContext, target: PreTrainedModel, drafter: Drafter, data: TrainingData) -> Teacher:
    """Return the recipe's teacher for the rows of `data`; a cache of hidden states is completed first.

    Every process builds its share of the missing shards, and all wait for each other.

    Raises:
        ConfigError: for an engine's states that are not the target's.
    """
    recipe, accelerator, console, rows = context.recipe, context.accelerator, context.console, data.rows
    if recipe.teacher.kind == "logprobs":
        from draftsmith.distill.logprob_teacher import LogprobTeacher

        return LogprobTeacher(target, rows)
    online, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    if settings.kind == "online":
        shared = recipe.train.sequence_parallel > 1  # a group of tensor parallelism reads one text anyway
        return online if shared else context.placement.teacher(online)
    from draftsmith.distill.hidden_state_cache import CachedTeacher, SignalCache

    if data.states is not None:
        read = FileStates(data.states, target, drafter.needs.layers, rows)
        console.say(f"teacher: states of {settings.file}, at most {read.error:.2%} from the target's on a few texts")
        return CachedTeacher(online, read)
    cache = SignalCache(target, rows, drafter.needs.layers, settings.dtype, shard_rows=settings.shard_rows)
    with ExitStack() as locks:
        missing, problems = cache.missing() if accelerator.is_main_process else ([], [])
        if missing:
            locks.enter_context(hold_cache(cache.folder))
            missing, problems = cache.missing()  # another run may have built some since
        for problem in problems:
            console.say(problem)
        missing: list[int] = broadcast_object_list([missing])[0]
        share = context.placement.share
        mine = missing[share.index :: share.count]
        if missing:
            with console.bar("teacher cache", cache.rows_of(mine), 0) as advance, autocast(recipe, accelerator.device):
                cache.build(mine, online, lambda: advance(None), writes=share.writes)
        context.placement.meet()
    console.say(
        f"teacher cache: {sum(cache.lengths)} tokens at {cache.bytes_a_token():.0f} bytes each in {cache.folder}; "
        f"{len(missing)} of {cache.shards} shards were built now"
    )
    return CachedTeacher(online, cache)


class TrainedStep(NamedTuple):
    """The module that is trained, its optimizers, and the adapters on the target where the recipe trains them."""

    module: AgreementStep
    optimizers: Optimizers
    adapters: Adapters | None


def step_and_optimizers(
    recipe: Recipe, target: PreTrainedModel, drafter: TrainableDrafter, teacher: Teacher, sizes: Sizes | None = None
) -> TrainedStep:
    """Build the step module and its optimizers, with adapters on the target where the recipe trains them too.

    `sizes`: see `optimizers`.
    """
    settings, cotrain = recipe.train, recipe.cotrain
    objective = Objective(**recipe.objective_options(recipe.draft_length(drafter.max_draft_length)))
    if settings.activation_checkpointing:
        recompute_activations(drafter)
    dtype = torch.bfloat16 if precision(recipe) == "bf16" else torch.float32
    beside = settings.adamw_learning_rate
    adamw_ratio = 1.0 if beside is None else beside / (settings.learning_rate or beside)
    shared = {"dtype": dtype, "adamw_ratio": adamw_ratio, "sizes": sizes}
    made = partial(optimizers, drafter, settings.optimizer, settings.weight_decay, **shared)
    if cotrain is None:
        step = AgreementStep(drafter, objective, teacher)
        return TrainedStep(step, made(), None)
    torch.manual_seed(settings.seed)
    adapters = Adapters.on(target, rank=cotrain.lora_rank, alpha=cotrain.lora_alpha, modules=cotrain.modules)
    if settings.activation_checkpointing:
        recompute_activations(target)
    assert isinstance(teacher, OnlineTeacher), "the recipe refuses other teachers with cotrain"
    weights = CotrainSettings(**{field.name: getattr(cotrain, field.name) for field in fields(CotrainSettings)})
    step = CotrainStep(drafter, objective, teacher, adapters, weights)
    trained = made(adapters=step.adapters, ratio=cotrain.learning_rate_ratio)
    return TrainedStep(step, trained, adapters)


def make_engine(recipe: Recipe, accelerator: Accelerator, step: nn.Module, optimizers: Optimizers) -> Engine:
    """Hand `step`, under the recipe's autocast, and its optimizers to the engine that accelerate was launched with."""
    inner = step.forward

    def forward(*arguments: Any) -> Any:
        with autocast(recipe, accelerator.device):
            return inner(*arguments)

    step.forward = forward
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from draftsmith.train.deepspeed import ZeroEngine  # DeepSpeed is an extra

        return ZeroEngine(accelerator, step, optimizers)
    return TorchEngine(accelerator, step, optimizers, recipe.train.clip_norm)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a transformers model, or the outermost blocks of a drafter that has its own.

    Attention with its own cache is no block: recomputing it would append the keys of earlier steps twice.
    """
    from transformers.models.llama.modeling_llama import LlamaMLP

    from draftsmith.heads.draft_model import DraftModel
    from draftsmith.heads.hydra import HydraHead
    from draftsmith.heads.medusa import ResidualBlock
    from draftsmith.heads.mlp_speculator import SpeculatorStep

    if isinstance(model, DraftModel):
        model = model.model
    if isinstance(model, PreTrainedModel):
        return [layer for name in layer_lists(model) for layer in model.get_submodule(name).children()]
    kinds = (LlamaMLP, HydraHead, ResidualBlock, SpeculatorStep)
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    return [block for name, block in blocks.items() if not any(name.startswith(f"{other}.") for other in blocks)]


def recompute_activations(model: nn.Module) -> None:
    """Store only each block's inputs for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    This takes less memory and one more forward pass of the blocks; gradients stay the same.
    """
    for block in blocks_of(model):
        block.forward = _recomputed(block.forward)


def compile_blocks(model: nn.Module) -> None:
    """Compile each block with torch.compile when it first runs, for any batch size and length."""
    if isinstance(draft := getattr(model, "model", None), PreTrainedModel):
        read_flat(draft, False)  # a flat row would be compiled for each combination of lengths
    for block in blocks_of(model):
        block.compile(dynamic=True)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def again(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **options)
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=again_reading, **options)

    return again
