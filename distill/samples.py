"""Responses sampled from the target: the text on which agreement is worth something. Cached, since it costs most."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from datasets import Dataset, disable_progress_bars, load_from_disk
from rich.console import Console
from rich.progress import track
from torch import nn

from draftsmith.decode.cache import PointerCache, context_limit
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.jsonl import answered_ids, conversation, prompt_ids, read_rows
from draftsmith.distill.targets import EMBEDDED, LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.provenance import fingerprint, model_fingerprint
from draftsmith.storage import atomic_folder, cache_dir

SAMPLES_VERSION = 1


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


@torch.inference_mode()
def sample_responses(
    target: LoadedTarget, prompts: list[list[int]], settings: SampleSettings, *, progress: bool = True
) -> list[dict]:
    """Sample in batches of prompts of similar length, through transformers' `generate`; in the order of `prompts`."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    starts = range(0, len(order), settings.batch_size)
    rows: dict[int, dict] = {}
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        console = Console(stderr=True)
        for start in track(starts, description="sampling from the target", console=console, disable=not progress):
            batch = order[start : start + settings.batch_size]
            responses = _batch(target.model, [prompts[index] for index in batch], settings)
            for index, response in zip(batch, responses, strict=True):
                prompt = prompts[index]
                rows[index] = {"input_ids": [*prompt, *response], "prompt_length": len(prompt)}
    return [rows[index] for index in range(len(prompts))]


def _batch(model: nn.Module, prompts: list[list[int]], settings: SampleSettings) -> list[list[int]]:
    """The responses to one batch, each up to and including its EOS."""
    width = max(len(prompt) for prompt in prompts)
    ids_BT = torch.zeros(len(prompts), width, dtype=torch.long, device=model.device)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BT[row, width - len(prompt) :] = 1
    eos = model.generation_config.eos_token_id
    greedy = settings.temperature == 0
    out_BT = model.generate(
        ids_BT,
        attention_mask=mask_BT,
        max_new_tokens=settings.response_tokens,
        do_sample=not greedy,
        temperature=None if greedy else settings.temperature,
        top_k=None if greedy else 0,
        top_p=None if greedy else 1.0,
        pad_token_id=0 if eos is None else (eos if isinstance(eos, int) else eos[0]),
        # transformers' default cache would copy every key and value at every step.
        past_key_values=PointerCache(model.config, width + settings.response_tokens),
    )
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    return [_until_end(row, ends) for row in out_BT[:, width:].tolist()]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    stop = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]
