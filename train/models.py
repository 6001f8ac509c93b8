"""Target, drafter and teacher of a run, built from its `RunContext`; the drafter that `start_from` names.

Training, `draftsmith data prepare` and the memory estimate build them here.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.config import section_of
from draftsmith.distill.data_section import TeacherServerSection
from draftsmith.distill.layerless import has_layers, skeleton
from draftsmith.distill.load_target import DTYPES, LoadedTarget, decoder_class
from draftsmith.distill.teacher import OnlineTeacher, measure_flat_rows, require_packable
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS, TrainableDrafter
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import load_drafter, unattached_drafter
from draftsmith.heads.configs import DRAFTERS, DrafterSection, is_named
from draftsmith.heads.lm_head import checked_size, logit_count, logits_map, most_frequent
from draftsmith.heads.lora import check_lora
from draftsmith.heads.model_config import eos_tokens, known_tokens
from draftsmith.provenance import model_fingerprints
from draftsmith.storage import hold_cache
from draftsmith.train.launch import RunContext
from draftsmith.train.optimizers import SCHEDULES
from draftsmith.train.progress import Console, in_units
from draftsmith.train.recipe import Recipe
from draftsmith.train.step import Teacher, autocast
from draftsmith.train.training_data import TrainingData, prepare_data


def load_frozen_target(context: RunContext) -> LoadedTarget:
    """Load the recipe's target to the device from which its placement distributes it."""
    settings, accelerator = context.recipe.target, context.accelerator
    images = context.recipe.data.images is not None
    context.console.say(f"  target: loading {settings.model}")
    if context.recipe.teacher.kind == "server":
        with accelerator.main_process_first():
            native = context.recipe.drafter.start == "trained"
            return settings.load_without_layers(device=accelerator.device, modules=native)
    with accelerator.main_process_first():  # a download happens once
        processor = settings.load_processor() if images else None
        loaded = settings.load(device=context.placement.load_to, images=images)
    if (note := loaded.dtype_note("target.dtype=bfloat16")) is not None:
        context.console.say(note)
    return replace(loaded, processor=processor)


def _load_compared(context: RunContext) -> PreTrainedModel | None:
    """Return the whole target in the first process of a run that compares an engine's layers with it."""
    settings, server = context.recipe.target, context.recipe.teacher.server
    if server is None or not server.compare or not context.accelerator.is_main_process:
        return None
    context.console.say(f"  target: loading {settings.model} with its layers, for teacher.server.compare")
    return settings.load(device=context.accelerator.device).model


def load_parts(context: RunContext) -> tuple[LoadedTarget, TrainableDrafter, TrainingData, Teacher]:
    """Load the target, build the drafter, and prepare data and teacher.

    A drafter that does not fit the target is refused before responses are sampled. The target is placed after the
    drafter is built: drafters are made from whole layers, and move to the target's device.

    Raises:
        ConfigError: for a drafter, a teacher or adapters that do not fit the target, and for data that cannot be used.
    """
    recipe, target = context.recipe, load_frozen_target(context)
    drafter = make_drafter(recipe, target)
    recipe.draft_length(drafter.max_draft_length)  # which refuses a longer one
    check_target(recipe, target.model, drafter)
    whole = _load_compared(context)
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
    return target, drafter, data, make_teacher(context, target.model, drafter, data, whole)


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
    if has_layers(model):
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


def make_teacher(
    context: RunContext,
    target: PreTrainedModel,
    drafter: Drafter,
    data: TrainingData,
    whole: PreTrainedModel | None = None,
) -> Teacher:
    """Return the recipe's teacher for the rows of `data`; a cache of hidden states is completed first.

    Every process builds its share of the missing shards, and all wait for each other.

    Args:
        whole: the target with its layers, with which an engine's are compared; None: they are not.

    Raises:
        ConfigError: for an engine's states that are not the target's.
    """
    recipe, accelerator, console, rows = context.recipe, context.accelerator, context.console, data.rows
    if recipe.teacher.server is not None:
        return _served(recipe.teacher.server, context, target, drafter, data, whole)
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
            with (
                console.bar("teacher cache", cache.rows_of(mine), 0) as advance,
                autocast(recipe.train, accelerator.device),
            ):
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
            with autocast(recipe.train, accelerator.device):
                cache.build(again, online, lambda: None)

    # Several processes would have to build it together.
    return CachedTeacher(online, cache.read, repair if accelerator.num_processes == 1 else None)


def _served(
    settings: TeacherServerSection,
    context: RunContext,
    target: PreTrainedModel,
    drafter: Drafter,
    data: TrainingData,
    whole: PreTrainedModel | None,
) -> Teacher:
    """Return the teacher whose states running engines compute, after they are compared; see `ServedStates.verify`."""
    from draftsmith.distill.server.states import ServedStates, ServedTeacher
    from draftsmith.distill.server.transport import bytes_in_flight

    states = ServedStates(settings, data.rows, target, drafter.needs.layers, context.console.say)
    sizes = max(map(len, data.rows["input_ids"])), len(states.served), states.hidden_size
    needed = bytes_in_flight(settings, context.recipe.train.batch_size, *sizes, target.dtype)
    states.transport.require_room(needed)
    if context.accelerator.is_main_process:
        states.transport.clear()
    context.placement.meet()  # a store is cleared of all states
    nats, off = states.verify(whole)
    compared = "" if off is None else f"all layers compared with the target's, at most {off:.2%} off; "
    context.console.say(
        f"teacher: states of layers {', '.join(map(str, states.served))} from {', '.join(settings.addresses)}; "
        f"log-probabilities differ by {nats:.2g} nats (median); {compared}up to {in_units(needed)} in "
        f"{states.transport.place}"
    )
    return ServedTeacher(states)


# Shapes: V vocabulary.


ROWS_COUNTED = 256
"""Rows whose responses are counted together."""


def token_counts(rows: Dataset, vocab_size: int) -> Tensor:
    """Return the count of each token in the responses, [V]."""
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for start in range(0, len(rows), ROWS_COUNTED):
        part = rows[start : start + ROWS_COUNTED]
        texts = zip(part["input_ids"], part.get("answers", part["spans"]), strict=True)
        responses = [ids[start:end] for ids, spans in texts for start, end in spans]
        counts_V += torch.bincount(torch.tensor(list(chain.from_iterable(responses))), minlength=vocab_size)
    return counts_V


def ends_of(target: LoadedTarget) -> frozenset[int]:
    """Return the tokens that end a response of the target: the EOS of its tokenizer and of its configs."""
    model, own = target.model, target.tokenizer.eos_token_id
    ends = eos_tokens(model.config, getattr(model, "generation_config", None)) | {own if isinstance(own, int) else -1}
    return ends & frozenset(range(logit_count(model)))


def frequent_tokens(rows: Dataset, size: int, target: LoadedTarget, console: Console) -> list[int]:
    """Return the `size` most frequent tokens of the responses, always with EOS, and print the share they cover."""
    counts_V = token_counts(rows, logit_count(target.model))
    ranked_V = counts_V.clone()
    ranked_V[known_tokens(target.tokenizer) :] = -1
    tokens = most_frequent(ranked_V, size, always=tuple(ends_of(target)))
    say_coverage(counts_V, tokens, console)
    return tokens


def say_coverage(counts_V: Tensor, tokens: list[int], console: Console) -> None:
    """Print which share of the responses a draft vocabulary covers; `counts_V`: see `token_counts`."""
    covered = float(counts_V[tokens].sum() / counts_V.sum())
    console.say(f"draft vocabulary: {len(tokens):,} of {len(counts_V):,} tokens, {covered:.2%} of the responses")


def target_of(recipe: Recipe, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a frozen target from its config, in the recipe's dtype."""
    if recipe.teacher.kind == "server":
        return skeleton(config, DTYPES[recipe.target.dtype])
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
    tokenizer, config = settings.load_tokenizer()
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


def with_rate(recipe: Recipe) -> Recipe:
    """Return the recipe with the default rate where it has none, so that the stored recipe has one.

    Raises:
        ConfigError: for a target whose config cannot be read, or an optimizer without a default rate.
    """
    if recipe.train.learning_rate is not None:
        return recipe
    rate = recipe.default_rate(target_width(recipe))
    if rate is None:
        raise ConfigError(f"train.learning_rate is missing with train.optimizer={recipe.train.optimizer!r}")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": rate})})


def described(recipe: Recipe, width: int) -> str:
    """Return the first line of a run: optimizer, rate, schedule and batch size, and whether the rate is the default."""
    settings, default = recipe.train, recipe.default_rate(width)
    of = f"the default for {recipe.drafter.type}{' with trained weights' * recipe.starts_trained} at width {width}"
    if default is None:
        of = "there is no default"
    elif settings.learning_rate != default:
        of += f" is {default:g}"
    schedule = SCHEDULES[settings.schedule].described.format(decay=settings.decay_steps)
    return (
        f"optimizer: {settings.optimizer}, rate {settings.learning_rate:g} ({of}), {schedule}, {settings.batch_size} "
        "sequences a step"
    )


def target_width(recipe: Recipe) -> int:
    """Return the target's hidden size from its config, without loading the target."""
    _, config = recipe.target.load_tokenizer()
    return width_of(config)


def width_of(config: PreTrainedConfig) -> int:
    """Return the hidden size of a target."""
    return config.get_text_config(decoder=True).hidden_size
