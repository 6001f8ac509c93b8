"""What a run trains on and is measured by: target samples, and prompts that are kept out of them.

Which sequences make up a step: a function of seed and step alone, so that nothing has to be saved to resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor

from draftsmith.distill.chat_template import Chat, template_text
from draftsmith.distill.dataset import ExampleSettings, hold_out, length_statistics, pack, read_examples
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.load_target import EMBEDDED, LoadedTarget, check_target_name
from draftsmith.distill.logprob_teacher import logprob_rows, require_reads_text_alone
from draftsmith.distill.objective import Objective
from draftsmith.distill.regeneration import Sampler, SampleSettings, Share, sampling_counts, target_samples
from draftsmith.distill.sources import conversation, looks_local, read_source
from draftsmith.errors import ConfigError
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_vocab import most_frequent
from draftsmith.heads.hidden_states import document_numbers
from draftsmith.heads.model_config import context_limit
from draftsmith.provenance import fingerprint
from draftsmith.train.progress import Console
from draftsmith.train.recipe import DataSection, Recipe
from draftsmith.train.target_placement import Placement


def batch_indices(seed: int, step: int, batch_size: int, length: int) -> list[int]:
    """The rows of global batch `step`: epochs are shuffled one by one and follow each other without a gap."""
    indices = []
    for position in range(step * batch_size, (step + 1) * batch_size):
        epoch, place = divmod(position, length)
        indices.append(_permutation(seed, epoch, length)[place])
    return indices


_last: dict[tuple[int, int, int], list[int]] = {}


def _permutation(seed: int, epoch: int, length: int) -> list[int]:
    key = (seed, epoch, length)
    if key not in _last:
        if len(_last) > 1:
            _last.clear()
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        _last[key] = torch.randperm(length, generator=generator).tolist()
    return _last[key]


@dataclass(frozen=True)
class Batch:
    """A padded part of a global batch. `mask_BT` marks positions whose next token belongs to a response."""

    input_ids_BT: Tensor
    attention_mask_BT: Tensor
    mask_BT: Tensor
    source_BS: Tensor | None = None
    """What an encoder reads; the input ids are then the decoder's."""
    source_mask_BS: Tensor | None = None
    rows: Sequence[int] = ()
    """Which rows of the data it holds."""
    documents_BT: Tensor | None = None
    """Of packed rows: which document each position belongs to; see `TeacherSignals`."""


def collate(rows: Dataset, indices: list[int], device: torch.device, start_token: int | None = None) -> Batch:
    """Pad the rows on the right to the longest of them.

    `start_token`: an encoder-decoder target's; prompts then go to its encoder, responses behind it to its decoder.
    """
    chosen = [rows[index] for index in indices]
    texts, spans = [row["input_ids"] for row in chosen], [row["spans"] for row in chosen]
    sources = None
    if start_token is not None:
        prompts = [of_row[0][0] for of_row in spans]
        sources = _padded([text[:length] for text, length in zip(texts, prompts, strict=True)], device)
        texts = [[start_token, *text[length:]] for text, length in zip(texts, prompts, strict=True)]
        spans = [[[1, len(text)]] for text in texts]
    ids_BT, attention_BT = _padded(texts, device)
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    for i, of_row in enumerate(spans):
        for start, end in of_row:
            mask_BT[i, start - 1 : end - 1] = True
    documents_BT = None
    if "documents" in rows.column_names:
        documents_BT = document_numbers([row["documents"] for row in chosen], ids_BT.shape[1]).to(device)
    return Batch(ids_BT, attention_BT, mask_BT, *(sources or (None, None)), rows=indices, documents_BT=documents_BT)


def _padded(texts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T], zeros behind, and the mask of what is text."""
    width = max(map(len, texts))
    ids_BT = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts])
    mask_BT = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return ids_BT.to(device), mask_BT.to(device)


def response_tokens(rows: Dataset, indices: list[int]) -> int:
    """Trained tokens of a global batch; every process can count them, so nothing has to be exchanged."""
    return sum(end - start for index in indices for start, end in rows[index]["spans"])


ROWS_COUNTED = 256
"""Whose responses are counted together."""


@dataclass(frozen=True)
class TrainingData:
    """`rows`: `input_ids` and `spans`, packed or not; `heldout`: prompts for the periodic evaluation."""

    rows: Dataset
    heldout: list[list[int]]
    questions: Dataset | None = None
    """What the target was asked, to be asked again; None for text that came with its answers."""


def check_sources(recipe: Recipe) -> None:
    """ConfigError for a missing or malformed file of data or template, before a target is loaded for minutes."""
    check_target_name(recipe.target.model)
    data = recipe.data
    if data.chat_template is not None:
        template_text(data.chat_template)
    if data.refresh_every is not None and (data.response == "text" or data.temperature == 0 == data.drafter_share):
        why = "response='text'" if data.response == "text" else "temperature=0, which gives the same text again"
        raise ConfigError(f"data.refresh_every={data.refresh_every} with {why}; expected null")
    _check_responses(recipe)
    if data.refresh_every is not None and recipe.teacher.kind != "online":
        raise ConfigError(f"teacher.kind={recipe.teacher.kind!r} with data.refresh_every; expected 'online'")
    check_teacher(recipe)
    for source in (data.prompts if recipe.teacher.kind != "logprobs" else None, recipe.evaluation.prompts):
        if source not in (None, EMBEDDED) and (Path(source).expanduser().exists() or looks_local(source)):
            for place, row in read_source(source):
                conversation(place, row)


def _check_responses(recipe: Recipe) -> None:
    data = recipe.data
    why = {
        "response='text', whose answers stand in the file": data.response == "text",
        "teacher.kind='logprobs', whose answers stand in its file": recipe.teacher.kind == "logprobs",
        "temperature=0, which gives the same text again": data.temperature == 0,
    }
    found = [reason for reason, holds in why.items() if holds]
    if data.responses > 1 and found:
        raise ConfigError(f"data.responses={data.responses} with {found[0]}; expected 1")


def chat_of(data: DataSection, target: LoadedTarget) -> Chat:
    """The target's tokenizer, with the recipe's template.

    Raises:
        ConfigError: where conversations are to be held with a target that has no template for them.
    """
    chat = Chat(target.tokenizer, data.chat_template, data.template_options)
    if data.turns == "all" and not target.tokenizer.chat_template:
        raise ConfigError("data.turns='all' with a tokenizer without a chat template; expected 'first', or a template")
    return chat


def prepare_data(
    recipe: Recipe,
    target: LoadedTarget,
    drafter: Drafter,
    accelerator: Accelerator,
    placement: Placement,
    console: Console,
) -> TrainingData:
    """Read the prompts and sample the target's responses, or take them from the cache or the file."""
    data, evaluation = recipe.data, recipe.evaluation
    chat = chat_of(data, target)
    if recipe.teacher.kind == "logprobs":
        return _from_logprobs(recipe, chat, target, accelerator, console)
    wanted = ExampleSettings(
        source=data.prompts,
        count=data.count,
        prompt_tokens=data.prompt_tokens,
        response_tokens=data.response_tokens,
        answered=data.response == "text",
        every_turn=data.turns == "all",
        deduplicate=data.deduplicate,
        seed=recipe.train.seed,
        subset=data.subset,
        split=data.split,
    )
    console.say(f"data: reading {data.prompts}")
    with accelerator.main_process_first():
        examples = read_examples(chat, wanted, context_limit(target.model.config), console.say)
    if evaluation.prompts is None and data.prompts != EMBEDDED:
        examples, heldout = hold_out(examples, evaluation.count)
    else:
        heldout = _heldout(evaluation.prompts or EMBEDDED, chat, target, recipe)
    if data.response == "text":
        return TrainingData(_ready(examples, data, console), heldout)
    settings = _sample_settings(recipe, seed=recipe.train.seed)
    sampler = Sampler(target, chat, settings, drafter if data.drafter_share else None, speculate=False)
    rows = target_samples(sampler, examples, share=_share(accelerator, placement), progress=console.visible)
    return TrainingData(_ready(rows, data, console), heldout, examples)


def _from_logprobs(
    recipe: Recipe, chat: Chat, target: LoadedTarget, accelerator: Accelerator, console: Console
) -> TrainingData:
    """The answers of the teacher's file, with what it knows of their tokens."""
    data, evaluation, file = recipe.data, recipe.evaluation, recipe.teacher.file
    with accelerator.main_process_first():
        rows = logprob_rows(file, target.tokenizer, console.say, chat)
    limit = context_limit(target.model.config)

    def fits(row: dict[str, Any]) -> bool:
        ((start, end),) = row["spans"]
        room = limit is None or end <= limit
        return start <= data.prompt_tokens and end - start <= data.response_tokens and room

    kept = [index for index, row in enumerate(rows) if fits(row)]
    if len(kept) < len(rows):
        most = f"data.prompt_tokens={data.prompt_tokens}, data.response_tokens={data.response_tokens} or the context"
        console.say(f"{file}: {len(rows) - len(kept):,} of {len(rows):,} are longer than {most}: left out")
    if not kept:
        raise ConfigError(f"teacher.file={file} leaves nothing to train on; expected at least one row that fits")
    rows = rows.select(kept[: data.count])
    if evaluation.prompts is not None:
        return TrainingData(_ready(rows, data, console), _heldout(evaluation.prompts, chat, target, recipe))
    openings = [fingerprint(row["input_ids"][: row["spans"][0][0]]) for row in rows]
    rows, heldout = hold_out(rows.add_column("opening", openings), evaluation.count)
    return TrainingData(_ready(rows, data, console), heldout)


def resample(
    recipe: Recipe,
    target: LoadedTarget,
    drafter: Drafter,
    data: TrainingData,
    number: int,
    accelerator: Accelerator,
    placement: Placement,
    console: Console,
) -> tuple[TrainingData, dict[str, float]]:
    """Ask everything again in round `number`, through the decoder with the drafter as it is now.

    A round's answers are kept in the run's folder, so that a run which goes on from a checkpoint finds them.
    Returns the new data, and what sampling took, see `sampling_counts`.
    """
    seed = recipe.train.seed + 7 * number  # seeds of rounds and of runs with neighbouring seeds stay apart
    was_training = drafter.training
    drafter.eval()
    length = recipe.draft_length(drafter.max_draft_length)
    settings = _sample_settings(recipe, seed)
    chat = chat_of(recipe.data, target)
    sampler = Sampler(target, chat, settings, drafter, speculate=recipe.data.speculate, draft_length=length)
    folder = Path(recipe.output) / "samples" / f"round-{number:03d}"
    rows = target_samples(
        sampler, data.questions, folder=folder, share=_share(accelerator, placement), progress=console.visible
    )
    drafter.train(was_training)
    sampled = sampling_counts(folder, settings.responses)
    return TrainingData(_ready(rows, recipe.data, console), data.heldout, data.questions), sampled


def _sample_settings(recipe: Recipe, seed: int) -> SampleSettings:
    data = recipe.data
    options = {"drafter_share": data.drafter_share, "responses": data.responses}
    return SampleSettings(data.response_tokens, data.temperature, data.batch_size, seed, **options)


def _share(accelerator: Accelerator, placement: Placement) -> Share:
    return Share(accelerator.process_index, accelerator.num_processes, placement.meet)


def _ready(rows: Dataset, data: DataSection, console: Console) -> Dataset:
    """Packed where the recipe says so; and what the run is fed, in a line."""
    found = length_statistics(rows)
    said = (
        f"data: {found.samples:,} samples, {found.tokens:,} tokens, {found.trained:,} of them trained; "
        f"lengths {found.p5} / {found.p50} / {found.p95} (5 %, median, 95 %), longest {found.longest}"
    )
    if not data.pack:
        console.say(said)
        return rows
    width = data.pack_tokens or data.prompt_tokens + data.response_tokens
    packed = pack(rows, width)
    console.say(f"{said}; packed into {len(packed):,} rows, {found.tokens / (len(packed) * width):.0%} full")
    return packed


def frequent_tokens(rows: Dataset, size: int, target: LoadedTarget, console: Console) -> list[int]:
    """The `size` tokens that responses hold most often, EOS among them; says how much of the responses they are."""
    vocab_size = target.model.get_output_embeddings().weight.shape[0]
    counts_V = torch.zeros(vocab_size, dtype=torch.long)
    for some in rows.iter(batch_size=ROWS_COUNTED):
        texts = zip(some["input_ids"], some["spans"], strict=True)
        responses = [ids[start:end] for ids, spans in texts for start, end in spans]
        counts_V += torch.bincount(torch.tensor(list(chain.from_iterable(responses))), minlength=vocab_size)
    eos = target.tokenizer.eos_token_id
    tokens = most_frequent(counts_V, size, always=() if eos is None else (eos,))
    covered = float(counts_V[tokens].sum() / counts_V.sum())
    console.say(f"draft vocabulary: {size:,} of {vocab_size:,} tokens, {covered:.2%} of the responses")
    return tokens


def _heldout(source: str, chat: Chat, target: LoadedTarget, recipe: Recipe) -> list[list[int]]:
    settings = recipe.evaluation
    if source == EMBEDDED:
        rows = embedded_prompts(target.tokenizer, "heldout", settings.count, settings.prompt_tokens)
        return [row.input_ids for row in rows]
    limit = context_limit(target.model.config)
    prompts: list[list[int]] = []
    for place, row in read_source(source):
        ids = chat.prompt(conversation(place, row))
        if limit is not None and len(ids) + settings.max_new_tokens > limit:
            raise ConfigError(
                f"{place}: {len(ids)} tokens; expected at most {limit - settings.max_new_tokens}, so that "
                f"evaluation.max_new_tokens={settings.max_new_tokens} fit the target's context of {limit}"
            )
        prompts.append(ids)
        if len(prompts) == settings.count:
            break
    return prompts


def check_teacher(recipe: Recipe) -> None:
    """ConfigError for a teacher that the rest of the recipe cannot be taught by, before anything is loaded."""
    settings = recipe.teacher
    if settings.kind != "logprobs":
        if settings.file is not None:
            raise ConfigError(f"teacher.file={settings.file} with teacher.kind={settings.kind!r}; expected 'logprobs'")
        return
    if settings.file is None:
        raise ConfigError("teacher.kind='logprobs' without teacher.file; expected a file of answers with logprobs")
    if recipe.cotrain is not None:
        raise ConfigError("teacher.kind='logprobs' with cotrain; expected 'online': the target changes")
    require_reads_text_alone(HEADS[recipe.drafter.type])
    Objective(**recipe.objective_options(draft_length=1)).require_usable(settings.kind)
