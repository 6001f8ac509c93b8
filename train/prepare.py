"""`draftsmith data`: look at what would be trained on, have a target answer prompts, prepare a recipe's data."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from rich.table import Table
from rich.text import Text

from draftsmith.decode.sampling import Sampling, require_seed
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.dataset import ExampleSettings, length_statistics, read_examples
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.load_target import load_target, load_tokenizer
from draftsmith.distill.regeneration import (
    Sampler,
    SampleSettings,
    response_folders,
    samples_key,
    sampling_counts,
    target_samples,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.model_config import context_limit
from draftsmith.locks import hold_name, require_cache
from draftsmith.provenance import tokenizer_fingerprint
from draftsmith.safe_text import Terminal
from draftsmith.storage import write_text, writing
from draftsmith.train.builders import data_and_drafter, make_teacher
from draftsmith.train.data import check_sources
from draftsmith.train.progress import Console as TrainConsole
from draftsmith.train.recipe import Recipe
from draftsmith.train.target_placement import Placement

READ, TRAINED = "dim", "bold green"
BRACKETS = ("⟦", "⟧")
"""Around trained text where there are no colours."""


@dataclass(frozen=True)
class DataRequest:
    """A source, a target, and how samples are made of them; see the recipe's data section."""

    source: str
    target: str
    count: int
    prompt_tokens: int
    response_tokens: int
    every_turn: bool = False
    subset: str | None = None
    split: str = "train"
    chat_template: str | None = None
    template_options: dict[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False

    def examples(self, *, answered: bool) -> ExampleSettings:
        keys = ("source", "count", "prompt_tokens", "response_tokens", "every_turn", "subset", "split")
        return ExampleSettings(**{key: getattr(self, key) for key in keys}, answered=answered)


def preview(request: DataRequest, *, answered: bool, show: int) -> None:
    """Print the first samples with the trained tokens marked, what was left out, and the lengths."""
    tokenizer, config = load_tokenizer(request.target, trust_remote_code=request.trust_remote_code)
    chat = Chat(tokenizer, request.chat_template, request.template_options)
    console = Terminal()
    notes: list[str] = []
    wanted = request.examples(answered=answered)
    if not answered:
        wanted = replace(wanted, response_tokens=0)  # how long answers will be is the recipe's business
    rows = read_examples(chat, wanted, context_limit(config), notes.append)
    for number, row in enumerate(rows.select(range(min(show, len(rows)))), 1):
        _show(console, tokenizer, row, number)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(_table(rows))
    if not answered:
        console.print("These are prompts: a recipe has the target answer them (data.response: target).")


def _show(console: Terminal, tokenizer: Any, row: dict[str, Any], number: int) -> None:
    ids, spans = row["input_ids"], row["spans"]
    trained = sum(end - start for start, end in spans)

    def piece(start: int, end: int) -> str:
        return text_after(tokenizer, ids[:start], ids[start:end], skip_special_tokens=False)

    console.rule(f"sample {number}: {len(ids)} tokens, {trained} trained", align="left")
    opening, closing = ("", "") if console.color_system else BRACKETS
    text, done = Text(), 0
    for start, end in spans:
        text.append(piece(done, start), READ)
        text.append(opening + piece(start, end) + closing, TRAINED)
        done = end
    text.append(piece(done, len(ids)), READ)
    console.print(text, soft_wrap=True)


def _table(rows: Dataset) -> Table:
    found = length_statistics(rows)
    columns = ("samples", "tokens", "trained", "5 %", "median", "95 %", "longest")
    table = Table(title="Lengths in tokens")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_row(*(f"{value:,}" for value in found))
    return table


def regenerate(request: DataRequest, settings: SampleSettings, out: Path, *, drafter: str | None, dtype: str) -> None:
    """Have the target answer every prompt, and write JSON lines that recipes read as they are.

    Killed and started again, it goes on behind the last batch that was finished.
    """
    require_seed("--seed", settings.seed)
    Sampling(settings.temperature)  # refused before anything is loaded
    with hold_name("--out", out):
        if out.exists():
            raise ConfigError(f"--out {out} exists; expected a new file")
        _regenerate(request, settings, out, drafter, dtype)


def _regenerate(request: DataRequest, settings: SampleSettings, out: Path, drafter: str | None, dtype: str) -> None:
    loaded = load_target(request.target, dtype=dtype, trust_remote_code=request.trust_remote_code)
    chat = Chat(loaded.tokenizer, request.chat_template, request.template_options)
    if request.every_turn and not loaded.tokenizer.chat_template:
        raise ConfigError("--turns all with a tokenizer without a chat template; expected first, or --chat-template")
    console = TrainConsole(True)
    questions = read_examples(chat, request.examples(answered=False), context_limit(loaded.model.config), console.say)
    writer = None if drafter is None else load_drafter(drafter, loaded.model, loaded.tokenizer)
    sampler = Sampler(loaded, chat, settings, writer)
    folder = out.with_name(f".{out.name}.{samples_key(sampler, questions)}")
    rows = target_samples(sampler, questions, folder=folder)
    made_with = tokenizer_fingerprint(loaded.tokenizer)
    apart = loaded.model.config.is_encoder_decoder
    with writing(out, "all answers are kept, and the same command writes them once there is room"):
        write_text(out, "".join(json.dumps(_line(row, chat, made_with, apart)) + "\n" for row in rows))
    sampled = sampling_counts(folder, settings.responses)
    for place in response_folders(folder, settings.responses):
        shutil.rmtree(place)
    if sampled:
        console.say(f"{sampled['tokens']:,} tokens with tau {sampled['tau']:.2f}")
    console.say(f"{out}: {len(rows):,} samples; data.prompts={out} data.response=text trains on them")


def _line(row: dict[str, Any], chat: Chat, tokenizer: str, apart: bool) -> dict[str, Any]:
    """Return a sample as text for whoever reads it, and as the tokens that were sampled.

    `apart`: the response begins a text of its own, as an encoder-decoder's does.
    """
    ids, spans = row["input_ids"], row["spans"]
    kept = {"input_ids": ids, "spans": spans, "tokenizer": tokenizer}
    if row["messages"]:
        return {"messages": json.loads(row["messages"]), **kept}
    start, end = spans[0]
    prompt = chat.tokenizer.decode(ids[:start], skip_special_tokens=True)
    response = text_after(chat.tokenizer, [] if apart else ids[:start], ids[start:end])
    return {"prompt": prompt, "response": response, **kept}


def prepare(recipe: Recipe) -> None:
    """Do all that a run does before its first step: sample the target, build the teacher's cache."""
    check_sources(recipe)
    require_cache()
    settings, console = recipe.target, TrainConsole(True)
    accelerator = Accelerator()
    placement = Placement(recipe, accelerator)
    options = {"revision": settings.revision, "dtype": settings.dtype, "device": accelerator.device}
    target = load_target(settings.model, trust_remote_code=settings.trust_remote_code, **options)
    _, data, drafter = data_and_drafter(recipe, target, accelerator, placement, console)
    make_teacher(recipe, target.model, drafter, data.rows, accelerator, placement, console)
    console.say(f"{recipe.name}: {len(data.rows):,} rows and {len(data.heldout)} held-out prompts are ready")
