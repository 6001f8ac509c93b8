"""The data of a run: training rows and held-out prompts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import LeftOut, mask_spans, question
from draftsmith.distill.data_section import (
    SELF,
    DataSection,
    Prompts,
    SourceSection,
    base_url,
    counts_of,
    sources_of,
    with_written_prompts,
)
from draftsmith.distill.dataset import (
    HeldOut,
    hold_back,
    hold_out,
    length_statistics,
    require_embeddings,
)
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.encoded_text import EVERYTHING, without_unknown
from draftsmith.distill.layerless import has_layers
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.mixture import describe, merged, of_source, read_sources
from draftsmith.distill.packing import pack
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import ProcessorInputs, extended, inputs_for
from draftsmith.heads.lm_head import lm_head_weight
from draftsmith.heads.model_config import context_limit, decoding_limit, eos_tokens, known_tokens, text_config
from draftsmith.names import EMBEDDED
from draftsmith.provenance import fingerprint_of_numbers
from draftsmith.train.launch import RunContext
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe
from draftsmith.train.recipe_sections import EvaluationSection
from draftsmith.train.step import ReadImages

if TYPE_CHECKING:
    from draftsmith.distill.state_files import StateFiles


@dataclass(frozen=True)
class TrainingData:
    """`rows`: `input_ids` and `spans`, packed or not; `heldout`: prompts for the periodic evaluation.

    With data.train_on='all', `answers` are the spans of the answers among all trained ones.
    """

    rows: Dataset
    heldout: list[HeldOut]
    states: "StateFiles | None" = None
    """The target's states of the rows, where an engine wrote them."""
    validation: int = 0
    """The last rows, which are not trained on."""
    sources: list[str] = field(default_factory=list)
    """Labels of the sources of the rows, in whose column `source` are their indices."""
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By label, the counts of samples that are trained on and of their trained tokens."""
    heldout_sources: list[str] = field(default_factory=list)
    """The label of the source of each held-out prompt."""

    @property
    def trained(self) -> int:
        """The number of rows that are trained on: the first ones."""
        return len(self.rows) - self.validation


def chat_of(data: DataSection, target: LoadedTarget) -> Chat:
    """Return the target's tokenizer with the recipe's template.

    Raises:
        ConfigError: where the target is to answer every turn and has no chat template.
    """
    ends = eos_tokens(target.model.config, target.model.generation_config)
    how = {"processor": target.processor, "ends": ends, "vocab_size": text_config(target.model).vocab_size}
    how["encodes"] = target.model.config.is_encoder_decoder
    chat = Chat(target.tokenizer, data.chat_template, data.template_options, **how)
    if data.every_turn and not target.tokenizer.chat_template:
        raise ConfigError("data.turns='all' with a tokenizer without a chat template; expected 'first', or a template")
    return chat


def prepare_data(context: RunContext, target: LoadedTarget) -> TrainingData:
    """Read the prompts, and sample the target's responses or read them from the cache or the file."""
    recipe, console, chat = context.recipe, context.console, chat_of(context.recipe.data, target)
    data, held = recipe.data, recipe.evaluation
    sources, rows, states = _read(context, chat, target)
    labels = [source.label for source in sources]
    if recipe.teacher.kind == "server":
        heldout, asked = [], labels  # nothing here decodes
    elif held.prompts is None and data.prompts != EMBEDDED:
        rows, heldout = hold_out(rows, held.count)
        asked = labels
    else:
        given = held.prompts or EMBEDDED
        write = partial(_self_prompts, context, chat, target, recipe.train.seed ^ 1)  # not those of data.prompts
        heldout = heldout_prompts(given, chat, target, recipe, console.say, write)
        asked = [source.label for source in sources_of(given)]
    rows = _readable(_answered(context, chat, target, sources, rows), target, console)
    rows = with_prompts(rows, target) if data.prompts_trained else rows
    parts = [rows] if data.validation is None else list(hold_back(rows, data.validation))
    if len(sources) > 1:
        _say_sources(labels, parts, heldout if asked is labels else [], console)
    counts = _counts(labels, parts[0])  # packed rows have no source
    rows, validation = _packed(parts, data, console)
    return TrainingData(rows, heldout, states, validation, labels, counts, [asked[prompt.source] for prompt in heldout])


def _known(rows: Dataset, tokenizer: PreTrainedTokenizerBase, console: Console) -> Dataset:
    """Return sampled rows of which no token is trained that is not in the tokenizer."""
    known = known_tokens(tokenizer)
    spans = [without_unknown(ids, own, known) for ids, own in zip(rows["input_ids"], rows["spans"], strict=True)]
    before, after = (sum(b - a for own in of for a, b in own) for of in (rows["spans"], spans))
    if before == after:
        return rows
    console.say(f"data: {before - after:,} of {before:,} sampled tokens are not in the tokenizer: not trained")
    kept = [index for index, own in enumerate(spans) if own]
    if not kept:
        raise ConfigError("data.prompts: no response has a token of the tokenizer; expected the target's own tokenizer")
    return rows.select(kept).remove_columns("spans").add_column("spans", [spans[index] for index in kept])


def _read(
    context: RunContext, chat: Chat, target: LoadedTarget
) -> tuple[list[DataSection], Dataset, "StateFiles | None"]:
    """Return the sources of data.prompts, their rows, and the states of `teacher.file`, which all rows have.

    Raises:
        ConfigError: where nothing can be trained on.
    """
    recipe, say = context.recipe, context.console.say
    file, states = recipe.teacher.file, None
    if file is not None:
        from draftsmith.distill.state_files import StateFiles

        say(f"teacher: reading {file}")
        vocab_size, hidden_size = lm_head_weight(target.model).shape
        states = StateFiles(file, vocab_size, hidden_size, say)
    sources = recipe.data.sources
    names = ", ".join(source.label for source in sources)
    say(f"data: reading {names}")
    read = with_written_prompts(sources, partial(_self_prompts, context, chat, target, recipe.train.seed))
    with context.accelerator.main_process_first():
        examples = read_sources(chat, read, context_limit(target.model.config), say, recipe.train.seed)
    return sources, examples if states is None else states.covered(examples, names, say), states


def _answered(
    context: RunContext, chat: Chat, target: LoadedTarget, sources: list[DataSection], rows: Dataset
) -> Dataset:
    """Return the rows with answers: those of the data, and the target's to the questions of other sources.

    Each source is sampled by itself, so that its answers are found again when another source has changed.
    """
    if len(sources) == 1:
        return rows if sources[0].answered else _with_questions(_sampled(context, chat, target, rows), rows)
    features = Features({name: kind for name, kind in rows.features.items() if name != "turns"})
    parts = []
    for number, source in enumerate(sources):
        own = of_source(rows, number)
        if not len(own):
            raise ConfigError(
                f"data.prompts={source.label}: all its rows are held out by evaluation.count; expected more rows, or a "
                "file in evaluation.prompts"
            )
        if not source.answered:
            context.console.say(f"data: answers to {source.label}")
            own = _with_questions(_sampled(context, chat, target, own), own)
        parts.append(own.select_columns(list(features)).cast(features))
    return merged(parts)


def _counts(labels: list[str], rows: Dataset) -> dict[str, tuple[int, int]]:
    """Return the counts of samples and of trained tokens by the label of their source."""
    counts: dict[str, tuple[int, int]] = dict.fromkeys(labels, (0, 0))
    sources = rows["source"] if len(labels) > 1 else repeat(0, len(rows))
    for number, spans in zip(sources, rows["spans"], strict=True):
        samples, tokens = counts[labels[number]]
        counts[labels[number]] = samples + 1, tokens + sum(end - start for start, end in spans)
    return counts


def _say_sources(labels: list[str], parts: list[Dataset], heldout: list[HeldOut], console: Console) -> None:
    """Print the counts of samples and tokens of each source, and of its prompts that are kept out of training."""
    for number, label in enumerate(labels):
        trained, *held = (of_source(part, number) for part in parts)
        summary = f"data: {label}: {describe(trained)}"
        summary += f"; {sum(prompt.source == number for prompt in heldout):,} prompts held out" if heldout else ""
        console.say(summary + "".join(f"; {len(part):,} samples for validation" for part in held))


def _self_prompts(context: RunContext, chat: Chat, target: LoadedTarget, seed: int, data: DataSection) -> Path:
    """Return the file of prompts that the target writes itself."""
    from draftsmith.distill.self_prompts import write_self_prompts

    console = context.console
    how = {"share": context.placement.share, "progress": console.visible, "say": console.say}
    return write_self_prompts(target, chat, data, seed, **how)


def _sampled(context: RunContext, chat: Chat, target: LoadedTarget, examples: Dataset) -> Dataset:
    """Return the target's responses, from a server where the recipe names one."""
    from draftsmith.distill.regeneration import Sampler, target_samples

    recipe, console = context.recipe, context.console
    data, seed = recipe.data, recipe.train.seed
    if data.server is None:
        sampler = Sampler(target, chat, data, seed)
        placement = context.placement.share
        return target_samples(sampler, examples, share=placement, progress=console.visible, say=console.say)
    from draftsmith.distill.server.probe import require_served
    from draftsmith.distill.server.responses import ServerSampler, server_samples

    model = None if recipe.target.sharded or not has_layers(target.model) else target.model
    check = partial(require_served, target=target.name, model=model)
    identity = fingerprint_of_numbers(target.model)
    engine, main, more = recipe.teacher.server, context.accelerator.is_main_process, {}
    if engine is not None and engine.answers_gib and data.server.base_url in map(base_url, engine.addresses):
        more = {"kv_transfer_params": {"include_output_tokens": True}}
    asker = ServerSampler(data, chat, seed, context_limit(target.model.config), identity, more=more)
    from draftsmith.distill.server.transport import swept

    with context.accelerator.main_process_first(), swept(engine if main else None):
        # the others read what it has stored
        return server_samples(asker, examples, console.say, check, progress=console.visible)


def _with_questions(rows: Dataset, questions: Dataset) -> Dataset:
    """Return responses with the columns of their questions that training and validation need."""
    asked = rows["question"]
    for name in ("opening", "images", "source"):
        if name in questions.column_names:
            values = list(questions[name])
            rows = rows.add_column(name, [values[question] for question in asked])
    if "marked" in questions.column_names:
        known = zip(rows["input_ids"], [questions[question] for question in asked], strict=True)
        rows = rows.add_column("marked", [_spans_after(ids, question) for ids, question in known])
    return rows


def _spans_after(ids: list[int], question: dict[str, Any]) -> list[list[int]]:
    """Return the spans that are marked in a question, for a text that repeats its tokens or shows it differently."""
    shown, marked = question["input_ids"], question["marked"]
    return marked if not marked or ids[: len(shown)] == shown else [EVERYTHING]


def with_prompts(rows: Dataset, target: LoadedTarget) -> Dataset:
    """Return rows of which all tokens are trained, but those of marked messages, of images and of no tokenizer."""
    known, image = known_tokens(target.tokenizer), getattr(target.processor, "image_token_id", None)
    every = []
    marks = rows["marked"] if "marked" in rows.column_names else [[]] * len(rows)
    for ids, answers, marked in zip(rows["input_ids"], rows["spans"], marks, strict=True):
        trained = [
            token < known and image not in (before, token) for before, token in zip([-1, *ids[:-1]], ids, strict=True)
        ]
        for start, end in marked:
            trained[start:end] = [False] * len(trained[start:end])
        for start, end in answers:
            trained[start:end] = [True] * (end - start)
        every.append(mask_spans(trained))
    return rows.rename_column("spans", "answers").add_column("spans", every)


def _readable(rows: Dataset, target: LoadedTarget, console: Console) -> Dataset:
    """Return the rows that the target reads whole, in which only tokens of the tokenizer are trained.

    Their responses contain no placeholder of an image.
    """
    rows = _known(rows, target.tokenizer, console)
    if target.processor is None or "images" not in rows.column_names:
        return rows
    image = getattr(target.processor, "image_token_id", None)
    texts = enumerate(zip(rows["input_ids"], rows["spans"], rows["images"], strict=True))
    kept = [n for n, (ids, spans, images) in texts if not images or image not in ids[spans[0][0] :]]
    if len(kept) < len(rows):
        console.say(f"data: {len(rows) - len(kept):,} of {len(rows):,} responses contain an image's token: left out")
    if not kept:
        raise ConfigError("data.images: every response contains an image's token; expected responses of text")
    return rows.select(kept)


def read_images(data: DataSection, target: LoadedTarget) -> ReadImages | None:
    """Return a function for the tensors of a row, extended to the row's length; None for data without images."""
    if data.images is None:
        return None
    chat, model = chat_of(data, target), target.model

    def read(images: str, ids: list[int]) -> ProcessorInputs | None:
        inputs = chat.row_inputs(images, ids)
        if inputs is None:
            return None
        return extended(inputs_for(model, inputs), inputs["attention_mask"].shape[1], len(ids))

    return read


def _packed(parts: list[Dataset], data: DataSection, console: Console) -> tuple[Dataset, int]:
    """Pack the rows where the recipe says so, and print the lengths of the samples.

    Return the rows, those of `data.validation` (the second part) at the end, and the number of the latter.
    """
    lengths = length_statistics(concatenate_datasets(parts))
    summary = (
        f"data: {lengths.samples:,} samples, {lengths.tokens:,} tokens, {lengths.trained:,} of them trained; "
        f"lengths {lengths.p5} / {lengths.p50} / {lengths.p95} (5 %, median, 95 %), longest {lengths.longest}"
    )
    if len(parts) > 1:
        summary += f"; {len(parts[1]):,} samples of {data.validation:,} prompts kept out of training"
    if data.pack:
        width = data.prompt_tokens + data.response_tokens
        parts = [pack(part, width) for part in parts]
        count = sum(map(len, parts))
        summary += f"; packed into {count:,} rows, {lengths.tokens / (count * width):.0%} full"
    console.say(summary)
    return concatenate_datasets(parts), sum(map(len, parts[1:]))


def heldout_prompts(
    prompts: Prompts,
    chat: Chat,
    target: LoadedTarget,
    recipe: Recipe,
    say: Callable[[str], None] = lambda _: None,
    write: Callable[[DataSection], Path] | None = None,
) -> list[HeldOut]:
    """Return the prompts that the periodic evaluation decodes; those of a file have no images.

    Args:
        say: called with the number of prompts of each source, where there are several.
        write: returns a file of prompts that the target writes, for 'self'.
    """
    settings, sources = recipe.evaluation, sources_of(prompts)
    found, left_out = list[HeldOut](), list[LeftOut]()
    for number, (source, count) in enumerate(zip(sources, counts_of(sources, settings.count), strict=True)):
        label = source.label
        if source.prompts == SELF and count and write is not None:
            asked = {"prompts": SELF, "kind": source.kind, "count": count}
            source = SourceSection(prompts=str(write(recipe.data.model_copy(update=asked))))
        rows = islice(_heldout(source, chat, target, settings, count, left_out), count)
        found += [HeldOut(ids, source=number) for ids in rows]
        if len(sources) > 1:
            have = sum(prompt.source == number for prompt in found)
            say(f"evaluation: {label}: {have:,} prompts; its share asks for {count:,}")
    if left_out:
        if not found:
            raise left_out[0]
        say(f"evaluation: {len(left_out):,} rows of evaluation.prompts are left out; the first: {left_out[0]}")
    return found


def _heldout(
    source: SourceSection,
    chat: Chat,
    target: LoadedTarget,
    settings: EvaluationSection,
    count: int,
    left_out: list[LeftOut],
) -> Iterator[list[int]]:
    """Yield the tokens of prompts; ConfigError for one that does not fit the target's context.

    Errors of rows that cannot be asked are appended to `left_out`.
    """
    if source.prompts == EMBEDDED:
        if count:
            rows = embedded_prompts(target.tokenizer, "heldout", count, settings.prompt_tokens)
            yield from (row.input_ids for row in rows)
        return
    limit = decoding_limit(target.model.config)
    for place, row in read_source(source.prompts, source.subset, source.split):
        try:
            ids = chat.prompt(question(place, row))
            require_embeddings(ids, chat, place)
        except LeftOut as error:
            left_out.append(error)
            continue
        if limit is not None and len(ids) + settings.max_new_tokens > limit:
            raise ConfigError(
                f"{place}: {len(ids)} tokens; expected at most {limit - settings.max_new_tokens}, so that "
                f"evaluation.max_new_tokens={settings.max_new_tokens} fit the target's context of {limit}"
            )
        yield ids
