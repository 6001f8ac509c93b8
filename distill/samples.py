"""Responses sampled from the target: the text on which agreement is worth something. Cached, since it costs most."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from datasets import Dataset, disable_progress_bars, load_from_disk
from rich.console import Console
from rich.progress import track

from draftsmith.decode.cache import context_limit
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.jsonl import answered_ids, conversation, prompt_ids, read_rows
from draftsmith.distill.targets import EMBEDDED, LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint, model_fingerprint
from draftsmith.storage import atomic_folder, cache_dir

SAMPLES_VERSION = 2
SEEDS_APART = 1_000_003
"""So that two seeds of a recipe share no prompt's seed."""


@dataclass(frozen=True)
class SampleSettings:
    """What decides the responses, the target and the prompts aside."""

    response_tokens: int
    temperature: float
    batch_size: int
    seed: int


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and, unless the target is to write it, of the response."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class ExampleSettings:
    """Where examples come from and how long they may be; see the recipe's data section."""

    source: str
    count: int
    prompt_tokens: int
    response_tokens: int
    answered: bool
    """Take the responses that the text holds, too."""
    seed: int


def training_examples(target: LoadedTarget, settings: ExampleSettings, report: Callable[[str], None]) -> list[Example]:
    """At most `count` examples from the embedded text or a JSONL file.

    Those of a file that are longer than asked for, or than the context, are left out, and `report` is told how many.
    """
    tokenizer, prompt_tokens = target.tokenizer, settings.prompt_tokens
    if settings.source == EMBEDDED:
        window = prompt_tokens + (settings.response_tokens if settings.answered else 0)
        rows = embedded_prompts(tokenizer, "train", settings.count, window, settings.seed)
        return [Example(row["input_ids"][:prompt_tokens], row["input_ids"][prompt_tokens:]) for row in rows]
    path = Path(settings.source)
    if settings.answered:
        pairs = [answered_ids(tokenizer, path, number, row, prompt_tokens) for number, row in read_rows(path)]
    else:
        pairs = [(prompt_ids(tokenizer, conversation(path, number, row)), []) for number, row in read_rows(path)]
    limit = context_limit(target.model)
    fitting = [
        Example(prompt, response)
        for prompt, response in pairs
        if 0 < len(prompt) <= prompt_tokens
        and len(response) <= settings.response_tokens
        and (limit is None or len(prompt) + len(response) <= limit)
    ]
    if len(fitting) < len(pairs):
        most = f"{prompt_tokens} tokens" + (f", or their answers than {settings.response_tokens}" * settings.answered)
        report(f"{len(pairs) - len(fitting)} of {len(pairs)} prompts of {path} are longer than {most}: left out")
    if not fitting:
        raise ConfigError.of("data.prompt_tokens", prompt_tokens, f"room for at least one prompt of {path}")
    return fitting[: settings.count]


def text_samples(examples: list[Example]) -> Dataset:
    """The examples' own responses, in the layout of `target_samples`."""
    return Dataset.from_list(
        [{"input_ids": [*row.prompt, *row.response], "prompt_length": len(row.prompt)} for row in examples]
    )


def target_samples(
    target: LoadedTarget, prompts: list[list[int]], settings: SampleSettings, *, progress: bool = True
) -> Dataset:
    """One response of the target to each prompt: rows of `input_ids` (prompt and response) and `prompt_length`.

    The same target, prompts and settings are sampled once and read from the cache afterwards.
    """
    disable_progress_bars()
    longest = max(len(prompt) for prompt in prompts) + settings.response_tokens
    limit = context_limit(target.model)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.prompt_tokens + data.response_tokens={longest}; expected at most the target's context of {limit}"
        )
    key = fingerprint([SAMPLES_VERSION, model_fingerprint(target.model), fingerprint(prompts), asdict(settings)])
    folder = cache_dir() / "samples" / key
    if not folder.is_dir():
        rows = sample_responses(target, prompts, settings, progress=progress)
        with atomic_folder(folder) as temporary:
            Dataset.from_list(rows).save_to_disk(temporary / "rows")
    return load_from_disk(folder / "rows")


def sample_responses(
    target: LoadedTarget, prompts: list[list[int]], settings: SampleSettings, *, progress: bool = True
) -> list[dict]:
    """Sample in batches of prompts of similar length; rows in the order of `prompts`.

    Each prompt has a seed of its own, so a response does not depend on the batch that it was sampled in.
    """
    decoder = SpeculativeDecoder(target.model)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    starts = range(0, len(order), settings.batch_size)
    rows: dict[int, dict] = {}
    console = Console(stderr=True)
    for start in track(starts, description="sampling from the target", console=console, disable=not progress):
        batch = order[start : start + settings.batch_size]
        outputs = decoder.generate_batch(
            [prompts[index] for index in batch],
            max_new_tokens=settings.response_tokens,
            temperature=settings.temperature,
            seeds=[SEEDS_APART * settings.seed + index for index in batch],
        )
        for index, output in zip(batch, outputs, strict=True):
            rows[index] = {"input_ids": [*prompts[index], *output.tokens], "prompt_length": len(prompts[index])}
    return [rows[index] for index in range(len(prompts))]
