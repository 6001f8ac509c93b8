"""Target-generated responses for on-policy distillation, cached on disk.

Prompts of similar length are answered together. Each answer is stored as soon as its batch has ended, so that a killed
run continues after the last batch. The batches are divided among the processes.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet
from datasets import Dataset, load_from_disk

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill.answered import AnsweredQuestions, sampling_key
from draftsmith.distill.chat_template import Chat
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.server.answers import Answer, AnswerJournal
from draftsmith.distill.turns import Asked, text_seed
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import decoding_limit, eos_tokens
from draftsmith.metrics import tau
from draftsmith.provenance import fingerprint, fingerprint_of_numbers
from draftsmith.reading import read_json
from draftsmith.storage import cache_dir, hold_cache, write_json
from draftsmith.terminal import Bars, Terminal, units

SAMPLES_VERSION = 5
COUNTS = "counts.json"
"""File next to the rows: tokens and rounds of the sampling."""


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

    def target_key(self, questions: Dataset) -> str:
        chat, model = self.chat, self.target.model
        settings = self.data.model_dump(include={"response_tokens", "temperature"})
        return fingerprint(
            [
                SAMPLES_VERSION,
                fingerprint_of_numbers(model),
                sorted(eos_tokens(model.config, model.generation_config)),
                chat.key() if any(questions["turns"]) else [],
                {**settings, "drafter_share": 0.0, "seed": self.seed},
                None,  # as in 0.3, where drafters could answer, so that its answers are found
            ]
        )

    def answer(self, rows: list[dict[str, Any]], indices: list[int], response: int = 0) -> list[dict[str, Any]]:
        """Return rows of `input_ids`, `spans`, `question` (its index) and `messages` (JSON, '' for plain text).

        There is one row a question, or several if the chat template renders an earlier turn differently later. The seed
        depends on the question (`number`, else its index) and on `response`, the number of the response.
        """
        texts = [
            Asked(index, list(row["input_ids"]), row["turns"], row.get("number"), row.get("images", ""))
            for row, index in zip(rows, indices, strict=True)
        ]

        def add(asked: Asked, turn: int, answer: Answer) -> int | None:
            return turn + 1 if self.add(asked, answer, turn) else None

        self.complete([(text, 0) for text in texts], response, add)
        return [row for text in texts for row in text.rows()]

    def complete(
        self, texts: list[tuple[Asked, int]], response: int, add: Callable[[Asked, int, Answer], int | None]
    ) -> None:
        """Answer conversations, each from a turn on.

        `add`: appends an answer and returns the turn that is to be answered next, None for a complete conversation.
        """
        while texts:
            answers = self._decode(texts, response)
            turns = [(text, add(text, turn, answer)) for (text, turn), answer in zip(texts, answers, strict=True)]
            texts = [(text, turn) for text, turn in turns if turn is not None]

    def add(self, asked: Asked, answer: Answer, turn: int) -> bool:
        """Append an answer and the next question; return False when the conversation is complete."""
        asked.add_tokens(answer.tokens or [], self.chat)
        return asked.ask(self.chat, turn + 1, self._fits)

    def _fits(self, prompt: list[int]) -> bool:
        return self._limit is None or len(prompt) + self.data.response_tokens <= self._limit

    def _decode(self, texts: list[tuple[Asked, int]], response: int) -> list[Answer]:
        """Return the answers to conversations, each with the number of its turn."""
        data, model = self.data, self.target.model
        shares = [1 / (data.response_tokens * text.turns) for text, _ in texts]
        outputs = self._decoder.generate_batch(
            [text.prompt for text, _ in texts],
            inputs=[self.chat.row_inputs(text.images, text.prompt) for text, _ in texts],
            seeds=[text_seed(self.seed, response, turn, text.number) for text, turn in texts],
            eos_token_id=sorted(eos_tokens(model.config, model.generation_config)),
            max_new_tokens=data.response_tokens,
            temperature=data.temperature,
            on_tokens=lambda place, new, _: self.advance(len(new) * shares[place]),
        )
        answers = []
        for output in outputs:
            usage = {"tokens": len(output.tokens), "rounds": 1 + len(output.rounds)}
            self.rounds, self.tokens = self.rounds + usage["rounds"], self.tokens + usage["tokens"]
            answers.append(Answer("", "", tokens=output.tokens, usage=usage))
        return answers


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
    share, data = share or Share(), sampler.data
    _require_room(sampler.target, questions, data)
    earlier = None
    if folder is None:
        earlier = cache_dir() / "samples" / sampler.target_key(questions)
        folder = earlier / sampling_key(sampler, questions)
    rows = folder / f"rows-{data.responses}.arrow"
    here = rows.exists()
    with hold_cache(folder) if share.first and not here else nullcontext():
        share.wait()  # until the first process holds the lock: after that all processes see the same files
        if not rows.exists():
            settings = data.model_dump(include={"response_tokens", "temperature"}) | {"seed": sampler.seed}
            journal = AnswerJournal(folder / f"answers-{share.index}.jsonl", settings)
            answered = AnsweredQuestions(sampler, questions, data.responses, journal)
            mine = _mine(answered, data.batch_size, share)
            # The first process joins all answers in the end; the others need those to their own questions.
            numbers = {answered.numbers[question] for _, question in (answered.places() if share.first else mine)}
            answered.copy_from(folder, numbers)
            if earlier is not None:
                answered.copy_from(earlier, numbers)
                _copy_earlier(journal, earlier, numbers)
            if share.first:
                new, total = len(answered.pending()), len(questions) * data.responses
                say(f"responses: {new:,} of {total:,} are new")
            _sample(sampler, answered, mine, progress)
            share.wait()
            if share.first:
                answered.copy_from(folder)
                _write(answered, rows)
            share.wait()
    return Dataset.from_file(str(rows))


def _mine(answered: AnsweredQuestions, size: int, share: Share) -> list[tuple[int, int]]:
    """Return this process's share of the responses; questions of similar length follow each other."""
    lengths = list(map(len, answered.questions["input_ids"]))
    order = sorted(answered.places(), key=lambda place: (place[0], lengths[place[1]]))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    return [place for batch in batches[share.index :: share.count] for place in batch]


def _sample(sampler: Sampler, answered: AnsweredQuestions, mine: list[tuple[int, int]], progress: bool) -> None:
    """Sample the responses among `mine` that are not stored; each is stored with all others of its batch and turn."""
    size, every = sampler.data.batch_size, [(place[0], *answered.replay(*place)) for place in mine]
    pending = [(response, asked, turn) for response, asked, turn in every if turn is not None]
    with Bars(*units(), console=Terminal(stderr=True), disable=not progress) as bar:
        task = bar.add_task("sampling from the target", total=len(mine), completed=len(mine) - len(pending))
        sampler.advance = lambda share: bar.advance(task, share)
        for response, same in groupby(pending, key=lambda text: text[0]):
            texts = [(asked, turn) for _, asked, turn in same]
            for start in range(0, len(texts), size):
                sampler.complete(
                    texts[start : start + size],
                    response,
                    lambda asked, turn, answer, n=response: answered.add(asked, n, turn, answer),
                )


def _write(answered: AnsweredQuestions, file: Path) -> None:
    """Write the rows, and the counts of the sampling beside them."""
    temporary = file.with_suffix(".tmp")
    answered.write(temporary, lambda _: {})
    usages = [answer.usage for answer in map(answered.journal.get, answered.journal) if answer is not None]
    write_json(file.parent / COUNTS, {key: sum(it.get(key, 0) for it in usages) for key in ("tokens", "rounds")})
    temporary.replace(file)


def _copy_earlier(journal: AnswerJournal, folder: Path, numbers: set[int]) -> None:
    """Copy answers that versions up to 0.4 stored: a data set for each response, or the parts of a killed run."""
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        _, _, response = place.name.removesuffix(".parts").partition("-")
        stored = [pyarrow.parquet.read_table(file) for file in sorted(place.glob("*.parquet"))]
        if (place / "rows").is_dir():
            stored.append(load_from_disk(place / "rows").data)
        for rows in stored:
            turns: Counter[int] = Counter()
            for row in rows.select(["input_ids", "spans", "number"]).to_pylist():
                for start, end in row["spans"]:
                    at = (int(response or 0), row["number"], turns[row["number"]])
                    turns[row["number"]] += 1
                    if row["number"] in numbers and at not in journal:
                        journal.add(at, Answer("", "", tokens=row["input_ids"][start:end]))


def sampling_counts(folder: Path) -> dict[str, float]:
    """Return `tau`, `tokens` and `rounds` of all sampling into `folder`, of all processes and restarts."""
    counts = read_json(folder / COUNTS)
    return {"tau": tau(counts["tokens"], counts["rounds"]), **counts}


def _require_room(target: LoadedTarget, questions: Dataset, data: DataSection) -> None:
    longest = max(map(len, questions["input_ids"])) + data.response_tokens
    limit = decoding_limit(target.model.config)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.prompt_tokens + data.response_tokens={longest}; expected at most the target's context of {limit}"
        )
