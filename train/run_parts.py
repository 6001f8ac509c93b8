"""Build the parts of a run from its `RunContext`: target, drafter, data, teacher, step, optimizers and engine.

Training, `draftsmith data prepare` and the memory estimate build these parts here.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from draftsmith.decode.clock import PartClock
from draftsmith.distill.cotraining import Adapters
from draftsmith.distill.load_target import LoadedTarget, load_processor, load_target
from draftsmith.distill.objective import Objective
from draftsmith.distill.teacher import OnlineTeacher, measure_flat_rows, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.flat_rows import read_flat, recompute_activations
from draftsmith.heads.hidden_states import layers_of
from draftsmith.heads.lm_head import checked_size, logits_map
from draftsmith.heads.lora import check_lora
from draftsmith.heads.model_config import known_tokens
from draftsmith.heads.sequence_part import SequencePart
from draftsmith.provenance import model_fingerprints
from draftsmith.storage import hold_cache
from draftsmith.train.continuation import started
from draftsmith.train.engine import Engine
from draftsmith.train.launch import RunContext, autocast, precision
from draftsmith.train.optimizers import OPTIMIZERS, Optimizers, Sizes, Trained, adapters_optimizer
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import AgreementStep, CotrainStep, Teacher
from draftsmith.train.training_data import (
    TrainingData,
    ends_of,
    frequent_tokens,
    logit_count,
    prepare_data,
    say_coverage,
    token_counts,
)


def load_frozen_target(context: RunContext) -> LoadedTarget:
    """Load the recipe's target to the device from which its placement distributes it."""
    settings, accelerator = context.recipe.target, context.accelerator
    images = context.recipe.data.images is not None
    context.console.say(f"  target: loading {settings.model}")
    with accelerator.main_process_first():  # a download happens once
        options = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        processor = load_processor(settings.model, **options) if images else None
        loaded = load_target(
            settings.model,
            dtype=settings.dtype,
            attn_implementation=settings.attn_implementation,
            device=context.placement.load_to,
            images=images,
            **options,
        )
    if (note := loaded.dtype_note("target.dtype=bfloat16")) is not None:
        context.console.say(note)
    return replace(loaded, processor=processor)


@dataclass(frozen=True)
class Parts:
    """The parts of a run that are loaded or built before its step and engine."""

    target: LoadedTarget
    """On its devices, see train/placement."""
    drafter: TrainableDrafter
    draft_length: int
    data: TrainingData
    teacher: Teacher


def load_parts(context: RunContext) -> Parts:
    """Load the target, build the drafter, and prepare data and teacher.

    A drafter that does not fit the target is refused before responses are sampled. The target is placed after the
    drafter is built: drafters are made from whole layers, and move to the target's device.

    Raises:
        ConfigError: for a drafter, a teacher or adapters that do not fit the target, and for data that cannot be used.
    """
    recipe, target = context.recipe, load_frozen_target(context)
    drafter = make_drafter(recipe, target)
    draft_length = recipe.draft_length(drafter.max_draft_length)
    check_target(recipe, target.model, drafter)
    # Of the target itself, while all weights are here: drafters are for it, not for its rounded or adapted weights.
    vars(target.model)["draftsmith_fingerprints"] = model_fingerprints(target.model)
    context.placement.place(target.model)
    drafter.to(context.accelerator.device)
    data = prepare_data(context, target)
    check_excluded(recipe.data.exclude_rows, data)
    if (vocabulary := drafter.draft_vocabulary) is not None:
        rows = data.rows.select(range(data.trained))
        if recipe.start_from is None:
            drafter.choose_tokens(target.model, frequent_tokens(rows, len(vocabulary), target, context.console))
        else:
            counts_V = token_counts(rows, logit_count(target.model))
            say_coverage(counts_V, vocabulary.tokens_D.tolist(), context.console)
    return Parts(target, drafter, draft_length, data, make_teacher(context, target.model, drafter, data))


def make_drafter(recipe: Recipe, target: LoadedTarget) -> TrainableDrafter:
    """Build the recipe's drafter, or load the one that `start_from` names.

    Raises:
        ConfigError: for a drafter that does not fit the target or the section `drafter`.
    """
    if recipe.start_from is not None:
        return started(recipe, recipe.start_from, target)
    HEADS[recipe.drafter.type].require_tokenizer(target.tokenizer, **recipe.drafter_options())
    fresh = new_drafter(recipe, target.model)
    fresh.limit_vocabulary(known_tokens(target.tokenizer))
    ends, size = ends_of(target), fresh.draft_vocab_size
    if size is not None and size < len(ends):
        raise ConfigError.of("drafter.draft_vocab_size", size, f"at least {len(ends)}, the target's EOS tokens")
    return fresh


def new_drafter(recipe: Recipe, target: PreTrainedModel, *, from_files: bool = True) -> TrainableDrafter:
    """Build the recipe's drafter with the first tokens as its draft vocabulary, which depends on the responses.

    Args:
        from_files: False: no checkpoint is read, and random weights of the same shapes take its place.
    """
    kind, options = HEADS[recipe.drafter.type], recipe.drafter_options()
    size = checked_size(recipe.draft_vocab_size, logit_count(target))
    if size is not None:
        options["draft_vocabulary"] = list(range(size))
    torch.manual_seed(recipe.train.seed)
    return (kind.from_target if from_files else kind.like_target)(target, **options)


def check_target(recipe: Recipe, model: PreTrainedModel, drafter: TrainableDrafter) -> None:
    """Raise ConfigError for a target or draft model that teacher, objective, packing or co-training do not support."""
    OnlineTeacher(model, drafter.needs.layers)
    draft_model = drafter.language_model
    if draft_model is not None:
        logits_map(draft_model)  # measured while an engine has not sharded it
        measure_flat_rows(draft_model)
    kind = model.config.model_type
    if recipe.teacher.kind in ("cached", "files") and model.config.is_encoder_decoder:
        raise ConfigError(
            f"teacher.kind={recipe.teacher.kind!r} with a target of model_type={kind!r}; expected 'online'"
        )
    if recipe.data.prompts_trained and model.config.is_encoder_decoder:
        raise ConfigError(f"data.train_on='all' with a target of model_type={kind!r}; expected 'answers'")
    if recipe.data.server is not None and model.config.is_encoder_decoder:
        raise ConfigError(f"data.server with a target of model_type={kind!r}; expected a decoder-only one")
    if recipe.target.quantization is not None:
        from draftsmith.distill.quantization import quantized_matrices

        quantized_matrices(model, recipe.target.quantization)
    if recipe.train.sequence_parallel > 1 and (reason := drafter.why_undivided()) is not None:
        raise ConfigError(
            f"train.sequence_parallel={recipe.train.sequence_parallel} with {reason}; expected 1, or a drafter of type "
            "dflash, or eagle, hass or eagle3 without a sliding window"
        )
    if recipe.data.pack:
        require_packable(model)
        if draft_model is not None:
            require_packable(draft_model, "drafter")
    if recipe.cotrain is not None:
        if model.config.is_encoder_decoder:
            raise ConfigError(f"cotrain with a target of model_type={kind!r}; expected a decoder-only one")
        check_lora(model, "cotrain", rank=recipe.cotrain.lora_rank, modules=recipe.cotrain.modules)


def check_excluded(excluded: Sequence[int], data: TrainingData) -> None:
    """Raise ConfigError for `data.exclude_rows` that the data lacks, or that leave nothing to train on."""
    if (largest := max(excluded, default=0)) >= len(data.rows):
        raise ConfigError.of("data.exclude_rows", [largest], f"rows below {len(data.rows)}, which is what the data has")
    if data.trained and not set(range(data.trained)) - set(excluded):
        raise ConfigError(f"data.exclude_rows leaves none of {data.trained} rows; expected at least one to train on")


def sequence_part(context: RunContext) -> SequencePart | None:
    """Return this process's part of each text; None where every process trains on texts of its own."""
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
    online, settings = OnlineTeacher(target, drafter.needs.layers), recipe.teacher
    if settings.kind == "online":
        return online
    from draftsmith.distill.hidden_state_cache import CachedTeacher, DamagedShard, SignalCache

    if data.states is not None:
        from draftsmith.distill.state_files import FileStates

        read = FileStates(data.states, target, drafter.needs.layers, rows)
        console.say(f"teacher: states of {settings.file}, at most {read.error:.2%} from the target's on a few texts")
        return CachedTeacher(online, read.read)
    cache = SignalCache(
        target,
        rows,
        drafter.needs.layers,
        settings.dtype,
        shard_rows=settings.shard_rows,
        normalizers=drafter.draft_vocabulary is not None,
    )
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
                cache.build(mine, online, lambda: advance(None))
        context.placement.meet()
    console.say(
        f"teacher cache: {sum(cache.lengths)} tokens at {cache.bytes_a_token():.0f} bytes each in {cache.folder}; "
        f"{len(missing)} of {cache.shards} shards were built now"
    )

    def repair(damaged: DamagedShard) -> None:
        again, _ = cache.missing()
        if again:  # not built again since the rows were read ahead
            console.say(f"teacher cache: {damaged.problem}; building it again")
            with autocast(recipe, accelerator.device):
                cache.build(again, online, lambda: None)

    # Several processes would have to build it together.
    return CachedTeacher(online, cache.read, repair if accelerator.num_processes == 1 else None)


def make_step(
    recipe: Recipe,
    target: PreTrainedModel,
    drafter: TrainableDrafter,
    teacher: Teacher,
    *,
    sizes: Sizes | None = None,
    part: SequencePart | None = None,
    clock: PartClock | None = None,
) -> tuple[AgreementStep, Optimizers, Adapters | None]:
    """Return the step module, its optimizers, and the adapters on the target where the recipe trains them too.

    Args:
        sizes: see `Trained`.
        part: see `TeacherSignals`.
        clock: measures the parts of the forward pass.
    """
    settings, cotrain = recipe.train, recipe.cotrain
    objective = Objective(**recipe.objective_options(recipe.draft_length(drafter.max_draft_length)))
    if settings.activation_checkpointing:
        recompute_activations(drafter.trained_blocks())
    trained = Trained.of(
        drafter,
        sizes=sizes or {},
        weight_decay=settings.weight_decay,
        dtype=torch.bfloat16 if precision(recipe) == "bf16" else torch.float32,
    )
    optimizers = OPTIMIZERS[settings.optimizer](trained)
    if cotrain is None:
        return AgreementStep(drafter, objective, teacher, part=part, clock=clock), optimizers, None
    torch.manual_seed(settings.seed)
    adapters = Adapters.on(target, rank=cotrain.lora_rank, modules=cotrain.modules)
    if settings.activation_checkpointing:
        recompute_activations(layers_of(target))
    assert isinstance(teacher, OnlineTeacher), "the recipe refuses other teachers with cotrain"
    step = CotrainStep(drafter, objective, teacher, adapters, cotrain, clock=clock)
    return step, [*optimizers, adapters_optimizer(step.adapters, cotrain.learning_rate_ratio)], adapters


def compile_drafter(drafter: TrainableDrafter) -> None:
    """Compile each block of the drafter when it first runs, for any batch size and length."""
    if drafter.language_model is not None:
        read_flat(drafter.language_model, False)  # a flat row would be compiled for each combination of lengths
    for block in drafter.trained_blocks():
        block.compile(dynamic=True)


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
    return Engine(accelerator, step, optimizers, recipe.train.clip_norm)
