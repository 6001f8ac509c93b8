"""Target-generated responses for on-policy distillation, cached on disk.

Prompts of similar length are answered together as a part; each part is a file that is written atomically, so that a
killed run continues after the last one. The parts are divided among the processes. Answers belong to their question:
for another data set, only the questions that were not answered before are asked.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import Dataset, concatenate_datasets, disable_progress_bars, load_from_disk

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.sequence import DecodeOutput
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.turns import Asked, question_numbers, text_seed
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import decoding_limit, eos_tokens
from draftsmith.metrics import tau
from draftsmith.provenance import fingerprint, fingerprint_of_numbers
from draftsmith.reading import read_json
from draftsmith.storage import atomic_folder, cache_dir, hold_cache, write_json, writing
from draftsmith.terminal import Bars, Terminal, units

SAMPLES_VERSION = 5
COUNTS = "counts.json"
"""File next to the rows: tokens and rounds of the sampling."""
KEPT = "kept.parquet"
"""File next to the parts: answers that were sampled for other data sets."""


@dataclass(frozen=True)
class Share:
    """The index of this process among `count` that divide the work, and a barrier."""

    index: int = 0
    count: int = 1
    wait: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        return self.index == 0


@dataclass
class Sampler:
    """Sample the target's responses.

    Args:
        data: how many tokens to sample, how often and at which temperature.
        drafter: proposes tokens; the distribution stays the target's. None decodes with the target alone.
    """

    target: LoadedTarget
    chat: Chat
    data: DataSection
    seed: int
    drafter: Drafter | None = None
    rounds: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)
    """Tokens so far; divided by `rounds`, the target's forward passes, they give tau."""

    def __post_init__(self) -> None:
        self.advance: Callable[[float], None] = lambda _: None
        """Called with the tokens that a round adds to an answer, as a share of the longest possible answer."""
        self._limit = decoding_limit(self.target.model.config)
        self._decoder = SpeculativeDecoder(self.target.model, drafter=self.drafter)

    def answer(self, rows: list[dict[str, Any]], indices: list[int], response: int = 0) -> list[dict[str, Any]]:
        """Return rows of `input_ids`, `spans`, `question` (its index) and `messages` (JSON, '' for plain text).

        There is one row a question, or several if the chat template renders an earlier turn differently later. The seed
        depends on the question (`number`, else its index) and on `response`, the number of the response.
        """
        texts = []
        for row, index in zip(rows, indices, strict=True):
            text = Asked(index, list(row["input_ids"]), row["turns"], row.get("number"))
            texts.append(text)
            text.inputs = self.chat.row_inputs(row.get("images", ""), text.prompt)
        running, turn = texts, 0
        while running:
            for text, output in zip(running, self._decode(running, turn, response), strict=True):
                text.add_tokens(output.tokens, self.chat)
            turn += 1
            running = [text for text in running if text.ask(self.chat, turn, self._fits)]
        return [row for text in texts for row in text.rows()]

    def _fits(self, prompt: list[int]) -> bool:
        return self._limit is None or len(prompt) + self.data.response_tokens <= self._limit

    def _decode(self, texts: list[Asked], turn: int, response: int) -> list[DecodeOutput]:
        data, model = self.data, self.target.model
        shares = [1 / (data.response_tokens * text.turns) for text in texts]
        outputs = self._decoder.generate_batch(
            [text.prompt for text in texts],
            inputs=[text.inputs for text in texts],
            seeds=[text_seed(self.seed, response, turn, text.number) for text in texts],
            eos_token_id=sorted(eos_tokens(model.config, model.generation_config)),
            max_new_tokens=data.response_tokens,
            temperature=data.temperature,
            on_tokens=lambda place, new, _: self.advance(len(new) * shares[place]),
        )
        self.rounds += sum(1 + len(output.rounds) for output in outputs)
        self.tokens += sum(len(output.tokens) for output in outputs)
        return outputs


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
    say: Callable[[str], None] = lambda _: None,
) -> Dataset:
    """Return the target's responses to all questions, as rows of `Sampler.answer` in the order of the questions.

    With several responses to each, all first responses come first. Responses are cached by question, target and
    settings: only those that no data set has asked for yet are sampled.

    Args:
        folder: store the responses here instead of in the cache.
        say: called with the number of responses that are new.
    """
    disable_progress_bars()
    share = share or Share()
    data = sampler.data
    _require_room(sampler.target, questions, data)
    questions = questions.add_column("number", question_numbers(questions))
    cached = folder is None
    if folder is None:
        folder = cache_dir() / "samples" / target_key(sampler, questions) / samples_key(sampler, questions)
    folders = response_folders(folder, data.responses)
    here = all(place.is_dir() for place in folders)
    with hold_cache(folder) if share.first and not here else nullcontext():
        if cached and share.first and not here:
            for response, place in enumerate(folders):
                keep_answers(questions["number"], place, response)
        share.wait()  # until the first process holds the lock: after that all processes see the same files
        parts = {
            place: _parts(questions, data.batch_size, place, response)
            for response, place in enumerate(folders)
            if not place.is_dir()
        }
        if parts:
            every = [part for of_response in parts.values() for part in of_response]
            new = sum(len(part.indices) for part in every if not part.file.exists())
            say(f"responses: {new:,} of {len(questions) * data.responses:,} are new")
            _sample_parts(sampler, questions, every, share, progress)
            share.wait()
            if share.first:
                for place, of_response in parts.items():
                    kept = parts_of(place) / KEPT
                    _assemble([*([kept] if kept.exists() else []), *(part.file for part in of_response)], place)
            share.wait()
    return concatenate_datasets([_read_rows(place / "rows") for place in folders]).remove_columns("number")


def _read_rows(folder: Path) -> Dataset:
    rows = load_from_disk(folder)
    assert isinstance(rows, Dataset), f"{folder} was written as one data set without splits"
    return rows


def response_folders(folder: Path, responses: int) -> list[Path]:
    """Return the folders of the first, second, … responses to all questions."""
    return [folder, *(folder.with_name(f"{folder.name}-{response}") for response in range(1, responses))]


def sampling_counts(folder: Path, responses: int = 1) -> dict[str, float]:
    """Return `tau`, `tokens` and `rounds` of all sampling into `folder`, of all processes and restarts."""
    counts = _summed([place / COUNTS for place in response_folders(folder, responses)])
    return {"tau": tau(counts["tokens"], counts["rounds"]), **counts}


def target_key(sampler: Sampler, questions: Dataset) -> str:
    """Return a key of what the answer to a question depends on besides the question and the number of the response."""
    chat, model = sampler.chat, sampler.target.model
    settings = sampler.data.model_dump(include={"response_tokens", "temperature"})
    return fingerprint(
        [
            SAMPLES_VERSION,
            fingerprint_of_numbers(model),
            sorted(eos_tokens(model.config, model.generation_config)),
            chat.key() if any(questions["turns"]) else [],
            {**settings, "drafter_share": 0.0, "seed": sampler.seed},
            None,  # as in 0.3, where drafters could answer, so that its answers are found
        ]
    )


def samples_key(sampler: Sampler, questions: Dataset) -> str:
    """Return the cache key of the responses, from everything that they depend on except their number."""
    # Questions that are answered together: the files of a killed run are divided as before.
    return fingerprint([target_key(sampler, questions), question_numbers(questions), sampler.data.batch_size])


def _require_room(target: LoadedTarget, questions: Dataset, data: DataSection) -> None:
    longest = max(map(len, questions["input_ids"])) + data.response_tokens
    limit = decoding_limit(target.model.config)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.prompt_tokens + data.response_tokens={longest}; expected at most the target's context of {limit}"
        )


def parts_of(folder: Path) -> Path:
    """Return the folder of the parts until all are there."""
    return folder.with_name(f"{folder.name}.parts")


def keep_answers(numbers: list[int], place: Path, response: int) -> None:
    """Copy the answers to these questions from folders beside `place`, which other data sets were sampled into."""
    files = parts_of(place)
    if place.is_dir() or any(files.glob("*.parquet")):
        return  # a killed run has its copy, if there was anything to copy
    wanted, kept = {number: index for index, number in enumerate(numbers)}, []
    for rows in _answers_beside(place, response):
        here = [index for index, number in enumerate(rows["number"]) if number in wanted]
        chosen = rows.select(here)
        asked = [wanted[number] for number in chosen["number"]]
        kept.append(chosen.remove_columns("question").add_column("question", asked))
        wanted = {number: index for number, index in wanted.items() if index not in asked}
    if any(map(len, kept)):
        rows = concatenate_datasets([part for part in kept if len(part)])
        _write_part(files / KEPT, rows.to_list(), {"tokens": 0, "rounds": 0})


def _answers_beside(place: Path, response: int) -> Iterator[Dataset]:
    """Yield the rows of other data sets: of finished ones, and of parts that a killed run left."""
    for folder in sorted(place.parent.iterdir()) if place.parent.is_dir() else ():
        _, _, number = folder.name.removesuffix(".parts").partition("-")
        if folder.name.startswith(".") or (number or "0") != str(response):
            continue
        with suppress(OSError):  # another run has just joined its parts
            if folder.suffix == ".parts":
                yield from (Dataset(pyarrow.parquet.read_table(file)) for file in sorted(folder.glob("*.parquet")))
            else:
                yield _read_rows(folder / "rows")


def _parts(questions: Dataset, size: int, folder: Path, response: int) -> list[_Part]:
    """Divide the questions that have no answer yet into parts of `size` questions of similar length."""
    files = parts_of(folder)
    kept = set(pyarrow.parquet.read_table(files / KEPT)["question"].to_pylist()) if (files / KEPT).exists() else set()
    lengths = list(map(len, questions["input_ids"]))
    order = sorted((index for index in range(len(lengths)) if index not in kept), key=lambda index: lengths[index])
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return [_Part(files / f"part-{number:05d}.parquet", group, response) for number, group in enumerate(groups)]


def _sample_parts(sampler: Sampler, questions: Dataset, parts: list[_Part], share: Share, progress: bool) -> None:
    """Sample the missing ones of this process's parts."""
    mine = parts[share.index :: share.count]
    missing = [part for part in mine if not part.file.exists()]
    done = sum(len(part.indices) for part in mine if part not in missing)
    with Bars(*units(), console=Terminal(stderr=True), disable=not progress) as bar:
        total = sum(len(part.indices) for part in mine)
        task = bar.add_task("sampling from the target", total=total, completed=done)
        sampler.advance = lambda share: bar.advance(task, share)
        for part in missing:
            tokens, rounds = sampler.tokens, sampler.rounds
            asked = {index: questions[index] for index in part.indices}
            rows = sampler.answer(list(asked.values()), part.indices, part.response)
            rows = [{**row, "number": asked[row["question"]]["number"]} for row in rows]
            counts = {"tokens": sampler.tokens - tokens, "rounds": sampler.rounds - rounds}
            _write_part(part.file, rows, counts)
            done += len(part.indices)
            bar.update(task, completed=done)


def _write_part(file: Path, rows: list[dict[str, Any]], counts: dict[str, int]) -> None:
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


def _summed(files: list[Path]) -> dict[str, int]:
    """Return the sums of the counts in JSON files."""
    every = [read_json(file) for file in files]
    return {key: sum(counts[key] for counts in every) for key in ("tokens", "rounds")}
