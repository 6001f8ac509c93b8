"""The commands of `draftsmith data`: preview samples, regenerate responses with a target, prepare a recipe's data."""

import json
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from draftsmith.distill.answered import sampling_key
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import SELF, DataSection, ServerSection, with_written_prompts
from draftsmith.distill.dataset import length_statistics
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.messages import ASSISTANT
from draftsmith.distill.mixture import of_source, read_sources
from draftsmith.distill.regeneration import Sampler, sampling_counts, target_samples
from draftsmith.distill.self_prompts import write_self_prompts
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.model_config import context_limit, eos_tokens, vocabulary_of
from draftsmith.option_fields import check_options
from draftsmith.provenance import tokenizer_fingerprint
from draftsmith.storage import hold_name, write_text, writing
from draftsmith.terminal import Terminal
from draftsmith.train.data_settings import Preview, Regeneration
from draftsmith.train.launch import RunContext, make_accelerator, preflight
from draftsmith.train.models import load_parts, with_section
from draftsmith.train.progress import Console
from draftsmith.train.recipe import Recipe

READ, TRAINED = "dim", "bold green"
BRACKETS = ("⟦", "⟧")
"""Marks around trained text where there are no colours."""


def preview(settings: Preview) -> None:
    """Print the first samples with trained tokens marked, the number of samples left out, and statistics of lengths."""
    check_options(settings)
    data, target = settings.data, settings.target
    tokenizer, config = target.load_tokenizer()
    ends = target.load_ends()
    how = {"vocab_size": vocabulary_of(config), "encodes": config.is_encoder_decoder}
    chat = Chat(tokenizer, data.chat_template, data.template_options, ends=ends, **how)
    console = Terminal()
    notes: list[str] = []
    # Without answers, the recipe decides how long responses will be.
    sources = [it if it.answered else it.model_copy(update={"response_tokens": 0}) for it in data.sources]
    if any(source.prompts == SELF for source in sources):
        few = {"count": max(1, settings.show)}  # the target takes seconds for each
        sources = [source.model_copy(update=few) if source.prompts == SELF else source for source in sources]
        sources = _written(sources, target.load(), chat, 0, notes.append)
    rows = read_sources(chat, sources, context_limit(config), notes.append)
    parts = [of_source(rows, number) for number in range(len(sources))] if len(sources) > 1 else [rows]
    shown = [part[index] for index in range(settings.show) for part in parts if index < len(part)]
    for number, row in enumerate(shown[: settings.show], 1):
        _show(console, tokenizer, row, number)
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(_table(rows, sources))
    if not data.answered:
        console.print("These are prompts; a recipe samples responses to them from the target (data.response: target).")


def engine_command_of(recipe: Recipe) -> str:
    """Return the command that starts the engine of a recipe's teacher.

    Raises:
        ConfigError: for a recipe with another teacher, or a drafter that does not fit the target.
    """
    from draftsmith.distill.server.transport import engine_command
    from draftsmith.train.estimate.fake_run import served_layers

    server = recipe.teacher.server
    if server is None:
        raise ConfigError(f"teacher.kind={recipe.teacher.kind!r}; expected 'server', with teacher.server")
    recipe = with_section(recipe)
    _, config = recipe.target.load_tokenizer()
    return engine_command(server, recipe.target, recipe.data, served_layers(recipe, config))


def _written(
    sources: list[DataSection], target: LoadedTarget, chat: Chat, seed: int, say: Callable[[str], None]
) -> list[DataSection]:
    """Return the sources, with the prompts that the target writes in place of 'self'."""
    return with_written_prompts(sources, lambda source: write_self_prompts(target, chat, source, seed, say=say))


def _show(console: Terminal, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], number: int) -> None:
    """Print a sample with its trained tokens highlighted."""
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


def _table(rows: Dataset, sources: list[DataSection]) -> Table:
    columns = ("samples", "tokens", "trained", "5 %", "median", "95 %", "longest")
    table = Table(title="Lengths in tokens")
    several = len(sources) > 1
    for column in ("source", *columns) if several else columns:
        table.add_column(column, justify="left" if column == "source" else "right", overflow="fold")
    for number, source in enumerate(sources if several else ()):
        table.add_row(source.label, *(f"{value:,}" for value in length_statistics(of_source(rows, number))))
    table.add_row(*["all"] * several, *(f"{value:,}" for value in length_statistics(rows)))
    return table


def regenerate(settings: Regeneration) -> None:
    """Sample the target's response to every prompt, and write JSON lines that recipes can use as data.

    After an interruption, the same call continues with the batch that was not finished. With `data.server`, a running
    server answers, of the target only the tokenizer is loaded, and the call continues with what was not answered.

    Raises:
        ConfigError: for a file that exists, or prompts that cannot be read.
    """
    check_options(settings)
    out = settings.out
    with hold_name("--out", out):
        if out.exists():
            raise ConfigError(f"--out {out} exists; expected a new file")
        if settings.data.server is None:
            _regenerate(settings)
        else:
            _regenerate_from(settings.data.server, settings)


def _regenerate(settings: Regeneration) -> None:
    target, data, out = settings.target, settings.data, settings.out
    loaded = target.load()
    config = loaded.model.config
    chat = _chat(data, loaded.tokenizer, config, eos_tokens(config, loaded.model.generation_config))
    console = Console(True)
    sources = _written(data.sources, loaded, chat, settings.seed, console.say)
    questions = _questions(chat, sources, context_limit(config), console)
    name = settings.drafter
    drafter = None if name is None else load_drafter(name, loaded.model, loaded.tokenizer)
    sampler = Sampler(loaded, chat, data, settings.seed, drafter)
    folder = out.with_name(f".{out.name}.{sampling_key(sampler, questions)}")
    rows = target_samples(sampler, questions, folder=folder, say=console.say)
    separate, count = config.is_encoder_decoder, len(rows)
    made_with = tokenizer_fingerprint(chat.tokenizer)
    _write_lines(out, (_line(rows[index], questions, chat, made_with, separate) for index in range(count)))
    sampled = sampling_counts(folder)
    del rows  # its file is open until then
    shutil.rmtree(folder)
    console.say(f"{sampled['tokens']:,} tokens with tau {sampled['tau']:.2f}")
    console.say(f"{out}: {count:,} samples")


def _questions(chat: Chat, sources: list[DataSection], context: int | None, console: Console) -> Dataset:
    """Return the prompts of all sources, also of those that have answers."""
    asked = [source.model_copy(update={"response": "target"}) for source in sources]
    return read_sources(chat, asked, context, console.say)


def _chat(
    data: DataSection, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, ends: frozenset[int]
) -> Chat:
    how = {"vocab_size": vocabulary_of(config), "encodes": config.is_encoder_decoder}
    chat = Chat(tokenizer, data.chat_template, data.template_options, ends=ends, **how)
    if data.every_turn and not tokenizer.chat_template:
        raise ConfigError("--turns all with a tokenizer without a chat template; expected first, or --chat-template")
    return chat


def _regenerate_from(server: ServerSection, settings: Regeneration) -> None:
    """Write the responses that a server samples, each with the model, the settings and the usage."""
    from draftsmith.distill.server.probe import require_served
    from draftsmith.distill.server.responses import ServerSampler, server_samples

    data, out = settings.data, settings.out
    target = settings.target
    tokenizer, config = target.load_tokenizer()
    if config.is_encoder_decoder:
        raise ConfigError(f"--server with {target.model}, an encoder-decoder; expected a decoder-only target")
    chat = _chat(data, tokenizer, config, target.load_ends())
    console = Console(True)
    questions = _questions(chat, data.sources, context_limit(config), console)
    sampler = ServerSampler(data, chat, settings.seed, context_limit(config), target.model)
    folder = out.with_name(f".{out.name}.{sampling_key(sampler, questions)}")
    rows = server_samples(sampler, questions, console.say, partial(require_served, target=target.model), folder=folder)
    source, count, made_with = sampler.described(), len(rows), tokenizer_fingerprint(tokenizer)
    _write_lines(
        out,
        (
            {**_line(row, questions, chat, made_with), "server": source, "usage": json.loads(row["usage"])}
            for row in (rows[index] for index in range(count))
        ),
    )
    del rows  # its file is open until then
    shutil.rmtree(folder)
    console.say(f"{out}: {count:,} samples from {server.model}")


def _write_lines(out: Path, lines: Iterable[dict[str, Any]]) -> None:
    with writing(out, "all answers are kept, and the same command writes them once there is room"):
        write_text(out, "".join(json.dumps(line) + "\n" for line in lines))


def _line(
    row: dict[str, Any], questions: Dataset, chat: Chat, made_with: str, separate: bool = False
) -> dict[str, Any]:
    """Return a sample as text, and as the token ids that were sampled with the fingerprint of their tokenizer.

    Args:
        made_with: that fingerprint; computing it reads the whole vocabulary.
        separate: the response is a text of its own, as with an encoder-decoder.
    """
    ids, spans = row["input_ids"], row["spans"]
    kept = {"input_ids": ids, "spans": spans, "tokenizer": made_with}
    if row["messages"]:
        asked, messages = json.loads(questions[row["question"]]["turns"]), json.loads(row["messages"])
        tools, prompt = asked["tools"], asked["turns"][0]
        given = any(message["role"] == ASSISTANT for message in prompt)  # they are not trained when they are read again
        whole = {"prompt": prompt, "completion": messages[len(prompt) :]} if given else {"messages": messages}
        return {**whole, **({"tools": tools} if tools else {}), **kept}
    start, end = spans[0]
    prompt = chat.tokenizer.decode(ids[:start], skip_special_tokens=True)
    response = text_after(chat.tokenizer, [] if separate else ids[:start], ids[start:end])
    return {"prompt": prompt, "response": response, **kept}


def prepare(recipe: Recipe) -> None:
    """Sample a recipe's responses and complete its teacher's cache, as a run does before its first step.

    Raises:
        ConfigError: for a recipe that cannot be prepared on this machine, before anything is loaded where possible.
    """
    preflight(recipe, training=False)
    recipe = with_section(recipe)
    accelerator = make_accelerator(recipe, Path(recipe.output))
    context = RunContext.of(recipe, accelerator)
    _, _, data, _ = load_parts(context)
    context.console.say(f"{recipe.name}: {len(data.rows):,} rows and {len(data.heldout)} held-out prompts are ready")
    accelerator.end_training()
