"""Target-generated responses for on-policy distillation, cached on disk.

Prompts of similar length are answered together as a part; each part is a file that is written atomically, so that a
killed run continues after the last one. The parts are divided among the processes.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import Dataset, concatenate_datasets, disable_progress_bars, load_from_disk
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from draftsmith.bars import Bars
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.distill.asked import Asked
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.model_config import context_limit, eos_tokens
from draftsmith.locks import hold_cache
from draftsmith.provenance import fingerprint, fingerprint_of_numbers, model_fingerprint
from draftsmith.safe_text import Terminal
from draftsmith.storage import atomic_folder, cache_dir, write_json, writing

SAMPLES_VERSION = 4
COUNTS = "counts.json"
"""File next to the rows: tokens, rounds and seconds of the sampling."""
SEEDS_APART = 1_000_003
"""Distance of the seeds of a prompt for neighbouring seeds of a recipe."""
RESPONSES_APART = 1_000_000_000_039
"""Distance of the seeds of two responses to a prompt, larger than for any seed of a recipe."""


@dataclass(frozen=True)
class SampleSettings:
    """Settings that determine the responses, apart from the target and the prompts."""

    response_tokens: int
    temperature: float
    batch_size: int
    seed: int
    drafter_share: float = 0.0
    """Share of the prompts that the drafter answers alone."""
    responses: int = 1
    """Responses to each prompt, each with its own seed."""


@dataclass(frozen=True)
class Share:
    """The index of this process among `count` that divide the work, and a barrier.

    Several processes may have one index; they do the same work, and one of them writes.
    """

    index: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None
    writes: bool = True

    @property
    def first(self) -> bool:
        return self.index == 0 and self.writes


@dataclass
class Sampler:
    """Sample responses with the speculative decoder, and for a share of the prompts with the drafter alone.

    Args:
        drafter: proposes tokens; the distribution stays the target's. None decodes with the target alone.
        speculate: use the drafter for proposals; otherwise it only answers its share.
        draft_length: by default the drafter's own.
    """

    target: LoadedTarget
    chat: Chat
    settings: SampleSettings
    drafter: Drafter | None = None
    speculate: bool = True
    draft_length: int | None = None
    rounds: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    """Tokens so far; divided by `rounds`, the target's forward passes, they give tau."""

    def __post_init__(self) -> None:
        self._limit = context_limit(self.target.model.config)
        proposes = self.speculate and self.drafter is not None
        self._decoder = (
            SpeculativeDecoder(self.target.model, drafter=self.drafter, draft_length=self.draft_length)
            if proposes
            else SpeculativeDecoder(self.target.model)
        )
        self._own: SpeculativeDecoder | None = None
        if self.settings.drafter_share:
            if not isinstance(self.drafter, DraftModel):
                kind = None if self.drafter is None else self.drafter.type
                raise ConfigError(
                    f"data.drafter_share={self.settings.drafter_share} with drafter.type={kind!r}; expected a "
                    "'draft_model', which generates without its target"
                )
            self._own = SpeculativeDecoder(self.drafter.model)

    def answer(self, rows: list[dict[str, Any]], indices: list[int], response: int = 0) -> list[dict[str, Any]]:
        """Return rows of `input_ids`, `spans`, `question` (its index) and `messages` (JSON, '' for plain text).

        There is one row a question, or several if the chat template renders an earlier turn differently later. The seed
        depends on the question and on `response`, the number of the response.
        """
        texts = [Asked(index, list(row["input_ids"]), row["turns"]) for row, index in zip(rows, indices, strict=True)]
        for text, row in zip(texts, rows, strict=True):
            text.inputs = self.chat.row_inputs(row.get("images", ""), text.prompt)
        running, turn = texts, 0
        while running:
            for text, output in zip(running, self._decode(running, turn, response), strict=True):
                text.add_tokens(output.tokens, self.chat)
            turn += 1
            running = [text for text in running if text.ask(self.chat, turn, self._fits)]
        return [row for text in texts for row in text.rows()]

    def _fits(self, prompt: list[int]) -> bool:
        return self._limit is None or len(prompt) + self.settings.response_tokens <= self._limit

    def _decode(self, texts: list[Asked], turn: int, response: int) -> list[DecodeOutput]:
        outputs: dict[int, DecodeOutput] = {}
        by_drafter = [text for text in texts if self._own is not None and self._drawn(text.index, response)]
        others = [text for text in texts if text not in by_drafter]
        for decoder, group in ((self._decoder, others), (self._own, by_drafter)):
            if decoder is None or not group:
                continue
            first = SEEDS_APART * self.settings.seed + RESPONSES_APART * response + 7_919 * turn
            seeds = [first + text.index for text in group]
            answers = decoder.generate_batch(
                [text.prompt for text in group],
                inputs=[text.inputs for text in group],
                seeds=seeds,
                eos_token_id=self.target.model.generation_config.eos_token_id,
                max_new_tokens=self.settings.response_tokens,
                temperature=self.settings.temperature,
            )
            outputs |= {text.index: output for text, output in zip(group, answers, strict=True)}
            if decoder is self._decoder:
                self.rounds += sum(1 + len(output.rounds) for output in answers)
                self.tokens += sum(len(output.tokens) for output in answers)
        return [outputs[text.index] for text in texts]

    def _drawn(self, index: int, response: int) -> bool:
        which = f"{self.settings.seed}:{index}" + (f":{response}" if response else "")
        return random.Random(which).random() < self.settings.drafter_share


@dataclass(frozen=True)
class _Part:
    """Questions that are answered in one batch, and the file of their answers."""

    file: Path
    indices: list[int]
    response: int


def target_samples(
    sampler: Sampler,
    questions: Dataset,
    *,
    folder: Path | None = None,
    share: Share | None = None,
    progress: bool = True,
) -> Dataset:
    """Return the target's responses to all questions, as rows of `Sampler.answer` in the order of the questions.

    With several responses to each, all first responses come first. Responses are cached by target, questions and
    settings; if more responses are asked for than are cached, only the new ones are sampled.

    Args:
        folder: store the responses here instead of in the cache.
    """
    disable_progress_bars()
    share = share or Share()
    settings = sampler.settings
    _require_room(sampler.target, questions, settings)
    if folder is None:
        folder = cache_dir() / "samples" / samples_key(sampler, questions)
    folders = response_folders(folder, settings.responses)
    here = all(place.is_dir() for place in folders)
    with hold_cache(folder) if share.first and not here else nullcontext():
        share.wait()  # until the first process holds the lock: after that all processes see the same files
        parts = {
            place: _parts(questions, settings.batch_size, place, response)
            for response, place in enumerate(folders)
            if not place.is_dir()
        }
        if parts:
            every = [part for of_response in parts.values() for part in of_response]
            _sample_parts(sampler, questions, every, share, progress)
            share.wait()
            if share.first:
                for place, of_response in parts.items():
                    _assemble([part.file for part in of_response], place)
            share.wait()
    return concatenate_datasets([_read_rows(place / "rows") for place in folders])


def _read_rows(folder: Path) -> Dataset:
    rows = load_from_disk(folder)
    assert isinstance(rows, Dataset), f"{folder} was written as one data set without splits"
    return rows


def response_folders(folder: Path, responses: int) -> list[Path]:
    """Return the folders of the first, second, … responses to all questions."""
    return [folder, *(folder.with_name(f"{folder.name}-{response}") for response in range(1, responses))]


def sampling_counts(folder: Path, responses: int = 1) -> dict[str, float]:
    """Return `tau`, `tokens`, `rounds` and `seconds` of all sampling into `folder`, of all processes and restarts.

    Seconds are summed over the parts and divided by the number of processes. Empty if an earlier version did not count
    them, or if nothing was decoded in rounds.
    """
    counts = _summed([place / COUNTS for place in response_folders(folder, responses)])
    return {"tau": counts["tokens"] / counts["rounds"], **counts} if counts.get("rounds") else {}


def samples_key(sampler: Sampler, questions: Dataset) -> str:
    """Return the cache key of the responses, from everything that they depend on except their number."""
    settings, chat, model = asdict(sampler.settings), sampler.chat, sampler.target.model
    del settings["responses"]
    later = chat.key() if any(questions["turns"]) else []
    if "images" in questions.column_names and any(questions["images"]):
        later.append(list(questions["images"]))
    return fingerprint(
        [
            SAMPLES_VERSION,
            fingerprint_of_numbers(model),
            sorted(eos_tokens(model.config, model.generation_config)),
            fingerprint([list(questions["input_ids"]), list(questions["turns"]), *later]),
            settings,
            model_fingerprint(sampler.drafter) if sampler.settings.drafter_share else None,
        ]
    )


def _require_room(target: LoadedTarget, questions: Dataset, settings: SampleSettings) -> None:
    longest = max(map(len, questions["input_ids"])) + settings.response_tokens
    limit = context_limit(target.model.config)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.prompt_tokens + data.response_tokens={longest}; expected at most the target's context of {limit}"
        )


def _parts(questions: Dataset, size: int, folder: Path, response: int) -> list[_Part]:
    """Divide the questions into parts of `size` questions of similar length."""
    lengths = list(map(len, questions["input_ids"]))
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    files = folder.with_name(f"{folder.name}.parts")
    return [_Part(files / f"part-{number:05d}.parquet", group, response) for number, group in enumerate(groups)]


def _sample_parts(sampler: Sampler, questions: Dataset, parts: list[_Part], share: Share, progress: bool) -> None:
    """Sample the missing ones of this process's parts."""
    mine = parts[share.index :: share.count]
    missing = [part for part in mine if not part.file.exists()]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Terminal(stderr=True), disable=not progress) as bar:
        task = bar.add_task("sampling from the target", total=sum(len(part.indices) for part in mine))
        bar.advance(task, sum(len(part.indices) for part in mine if part not in missing))
        for part in missing:
            tokens, rounds, started = sampler.tokens, sampler.rounds, time.perf_counter()
            rows = sampler.answer([questions[index] for index in part.indices], part.indices, part.response)
            seconds = (time.perf_counter() - started) / share.count
            counts = {"tokens": sampler.tokens - tokens, "rounds": sampler.rounds - rounds, "seconds": seconds}
            if share.writes:
                _write_part(part.file, rows, counts)
            bar.advance(task, len(part.indices))


def _write_part(file: Path, rows: list[dict[str, Any]], counts: dict[str, float]) -> None:
    """Write a part atomically, after its counts."""
    temporary = file.with_suffix(".tmp")
    try:
        with writing(file, "finished parts are kept; once there is room, the same command continues after them"):
            write_json(file.with_suffix(".json"), counts)
            Dataset.from_list(rows).to_parquet(temporary)
            with temporary.open("rb+") as handle:
                os.fsync(handle.fileno())
            temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _assemble(files: list[Path], folder: Path) -> None:
    """Write all parts as one data set in the order of the questions, and delete them."""
    whole = concatenate_datasets([Dataset(pyarrow.parquet.read_table(file)) for file in files])
    order = sorted(range(len(whole)), key=whole["question"].__getitem__)
    with (
        writing(folder, "all parts are kept; once there is room, the same command joins them"),
        atomic_folder(folder) as place,
    ):
        whole.select(order).flatten_indices().save_to_disk(place / "rows")
        write_json(place / COUNTS, _summed([file.with_suffix(".json") for file in files]))
    shutil.rmtree(files[0].parent)


def _summed(files: list[Path]) -> dict[str, float]:
    """Return the sums of the counts in JSON files; empty if a file is missing, as from an earlier version."""
    every = [json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {} for file in files]
    return {key: sum(counts[key] for counts in every) for key in every[0]} if all(every) else {}
