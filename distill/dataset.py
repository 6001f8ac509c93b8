"""Training examples as tokens: read once, checked and cached on disk; every row that is left out is counted."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, List, Value, disable_progress_bars
from datasets.arrow_writer import ArrowWriter

from draftsmith.distill.chat_template import Chat, characters
from draftsmith.distill.conversation import Conversation, LeftOut, conversation, is_blank, reason_left_out, require_most
from draftsmith.distill.data_section import DataSection
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.encoded_text import EVERYTHING, EncodedText
from draftsmith.distill.messages import FLAGS
from draftsmith.distill.samples import after_images, marked_spans, samples_of
from draftsmith.distill.sources import read_source, source_stamp
from draftsmith.errors import ConfigError, one_line
from draftsmith.heads.hidden_states import inputs_fingerprint
from draftsmith.names import EMBEDDED
from draftsmith.provenance import fingerprint
from draftsmith.storage import atomic_folder, cache_dir, hold_cache, write_json
from draftsmith.terminal import clock

VERSION = 6
REFUSED_FIRST = 100
"""Rows after which reading stops where more than half of them cannot be used."""
MOST_REASONS = 10
"""Reasons that are printed, the most frequent ones; those of chat templates may differ from row to row."""
SECONDS = 10
"""Time between two lines about how much has been read."""
FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "spans": List(List(Value("int64"))),
        "opening": Value("string"),
        "turns": Value("string"),
        "images": Value("string"),
    }
)
"""Columns of examples. An example without spans is a prompt for the target. `opening`: equal for conversations with the
same first messages; `turns`: the user's turns as JSON, '' for plain text. `images`: '', or as JSON the messages with
images that the text begins with, their row and a fingerprint of the processor's tensors."""
MARKED = Features({"marked": FEATURES["spans"]})
"""A further column with data.train_on='all': the spans of messages that the data marks as not trained."""


@dataclass
class RowCounts:
    """Numbers of rows that were read and left out."""

    rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of samples by reason."""
    context: int = 0
    """Number of answers that the data marks as not trained."""
    masked: int = 0
    """Number of their tokens that are not in the tokenizer."""
    unended: int = 0
    """Number of trained answers after which the chat template shows no token that ends the target's answers."""
    unread: list[str] = field(default_factory=list)
    """Keys of rows that are neither read nor carried over to answers."""

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1

    def lines(self, source: str) -> list[str]:
        """Return one line for each reason, and one for each kind of answers or tokens that are not trained."""
        frequent = sorted(self.left_out, key=lambda reason: -self.left_out[reason])[:MOST_REASONS]
        lines = [
            f"{source}: {number:,} of {self.rows:,} {reason}: left out"
            for reason, number in self.left_out.items()
            if reason in frequent
        ]
        if more := sum(number for reason, number in self.left_out.items() if reason not in frequent):
            lines.append(f"{source}: {more:,} of {self.rows:,} for other reasons: left out")
        if self.context:
            lines.append(f"{source}: {self.context:,} answers are marked by {', '.join(FLAGS)}: not trained")
        if self.masked:
            lines.append(f"{source}: {self.masked:,} tokens of answers are not in the tokenizer: not trained")
        if self.unended:
            lines.append(
                f"{source}: {self.unended:,} answers are shown without a token that ends them: not trained to end"
            )
        if self.unread:
            names = [one_line(name, 40) for name in self.unread[:MOST_REASONS]]
            lines.append(f"{source}: keys of rows that are not used: {', '.join(names)}")
        return lines


def read_examples(
    chat: Chat, data: DataSection, context: int | None, report: Callable[[str], None], seed: int = 0
) -> Dataset:
    """Return at most `count` examples (`FEATURES`); `report` is called with the counts and reasons of those left out.

    The examples are cached by source, tokenizer, template and settings.

    Args:
        seed: of the choice among the embedded prompts.

    Raises:
        ConfigError: for a source that cannot be read, or if no example is left or most rows cannot be used.
    """
    disable_progress_bars()
    if data.prompts == EMBEDDED:
        return _embedded(chat, data, seed)
    stamp = source_stamp(data.source, data.subset, data.split)
    if data.images is not None:
        stamp = [stamp, source_stamp(data.images), str(chat.processor)]
    limits = data.model_dump(include={"prompts", "count", "prompt_tokens", "response_tokens"})
    limits |= {"answered": data.answered, "every_turn": data.every_turn}
    limits |= {"train_on": "all"} if data.prompts_trained else {}
    key = fingerprint([VERSION, stamp, chat.key(), limits, context, chat.vocab_size])
    folder = cache_dir() / "examples" / key
    with nullcontext() if folder.is_dir() else hold_cache(folder):
        if not folder.is_dir():
            with atomic_folder(folder) as temporary:
                counts = _write(temporary / "rows.arrow", chat, data, context, report)
                write_json(temporary / "counts.json", asdict(counts))
    counts = RowCounts(**json.loads((folder / "counts.json").read_text(encoding="utf-8")))
    for line in counts.lines(data.label):
        report(line)
    return Dataset.from_file(str(folder / "rows.arrow"))


def _write(file: Path, chat: Chat, data: DataSection, context: int | None, report: Callable[[str], None]) -> RowCounts:
    """Write the examples row by row, so that memory does not grow with the data; `report` is called now and then."""
    counts, kept, began = RowCounts(), 0, time.monotonic()
    said = began
    chat = replace(chat, longest=characters(data.prompt_tokens + data.response_tokens))
    with ArrowWriter(features=_features(data), path=str(file)) as writer:
        for row in _examples(chat, data, context, counts):
            writer.write(row)
            kept += 1
            if time.monotonic() - said >= SECONDS:
                said = time.monotonic()
                left = clock((said - began) * (data.count / kept - 1))  # less where the data end before
                read = f"{counts.rows:,} rows read, {kept:,} of {data.count:,} samples"
                report(f"{data.label}: {read}, at most {left} left")
            if kept == data.count:
                break
        writer.finalize()
    if not kept:
        why = "; ".join(counts.lines(data.label))
        raise ConfigError(f"data.prompts={data.label} leaves nothing to train on ({why}); expected at least one row")
    return counts


def _features(data: DataSection) -> Features:
    return Features({**FEATURES, **MARKED}) if data.prompts_trained else FEATURES


def _examples(chat: Chat, data: DataSection, context: int | None, counts: RowCounts) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    faulty, last = 0, None
    folder = None if data.images is None else Path(data.images).expanduser()
    for place, row in read_source(data.source, data.subset, data.split):
        counts.rows += 1
        try:
            dialogue = _usable(place, row, folder, data)
            samples, images = _samples(chat, dialogue, data)
        except ConfigError as error:
            counts.leave_out(reason_left_out(place, error))
            if not isinstance(error, LeftOut) or error.faulty:
                faulty, last = faulty + 1, error
            if counts.rows >= REFUSED_FIRST:
                require_most(counts.rows, faulty, last)
            continue
        if len(counts.unread) < MOST_REASONS:
            counts.unread += sorted(dialogue.unused - {*counts.unread})
        counts.context += len(dialogue.answers) - len(dialogue.trained) if data.answered else 0
        if not samples:
            counts.leave_out("have no trained token")
        for sample in samples:
            reason = _too_long(sample, data, context)
            if reason is None and is_beyond(sample.input_ids, chat):
                reason = f"have a token beyond the target's {chat.vocab_size} embeddings"
            if reason is None:
                seen_images = json.loads(images)["content"] if images else None
                turns = dialogue.turns if data.every_turn else None
                twin = fingerprint([sample.input_ids, turns, seen_images])
                reason = "are the same as another" if twin in seen else None
                seen.add(twin)
            if reason is not None:
                counts.leave_out(reason)
                continue
            counts.masked += sample.masked
            counts.unended += sample.unended
            yield {
                "input_ids": sample.input_ids,
                "spans": sample.spans,
                "opening": fingerprint(dialogue.opening),
                "turns": _turns(dialogue, data.every_turn),
                "images": images,
                **({"marked": _marked(chat, dialogue, sample, data)} if data.prompts_trained else {}),
            }
    require_most(counts.rows, faulty, last)


def _usable(place: str, row: dict[str, Any], folder: Path | None, data: DataSection) -> Conversation:
    """Return the conversation of a row; LeftOut for one without a question, or with an empty answer."""
    dialogue = conversation(place, row, folder)
    problem = dialogue.problem or ("have an empty answer" if data.answered and _says_nothing(dialogue) else None)
    if problem is not None:
        raise LeftOut(f"{place}: {problem}", problem)
    return dialogue


def _says_nothing(dialogue: Conversation) -> bool:
    """Return whether some answer that is trained has no text, thinking or tool call."""
    said = ("content", "reasoning_content", "tool_calls")
    answers = [dialogue.messages[place] for place in dialogue.trained]
    return any(all(is_blank(answer.get(key)) for key in said) for answer in answers)


def _samples(chat: Chat, dialogue: Conversation, data: DataSection) -> tuple[list[EncodedText], str]:
    """Return the samples of a conversation, and the column `images`, which all of them share."""
    if not dialogue.images or data.images is None:  # without the folder, images are refused
        if data.answered:
            return samples_of(chat, dialogue, data.prompt_tokens), ""
        if data.every_turn and dialogue.messages:
            chat.require_turns(dialogue)
        return [EncodedText(chat.prompt(dialogue), [])], ""
    ids, inputs = chat.prompt_inputs(dialogue.asked, dialogue)
    row = {"place": dialogue.place, "messages": dialogue.asked, "tools": dialogue.tools}
    images = json.dumps({**row, "content": inputs_fingerprint(inputs)}, default=str) if inputs else ""
    return after_images(chat, dialogue, ids) if data.answered else [EncodedText(ids, [])], images


def _marked(chat: Chat, dialogue: Conversation, sample: EncodedText, data: DataSection) -> list[list[int]]:
    """Return the spans of messages that the data marks as not trained, in a sample and in what is answered to it."""
    shown = len(dialogue.messages if data.answered else dialogue.asked)
    later = data.every_turn and any(place >= shown for place in dialogue.marked)
    return [EVERYTHING] if later else marked_spans(chat, dialogue, sample.input_ids, shown)


def _too_long(sample: EncodedText, data: DataSection, context: int | None) -> str | None:
    """Return why a sample is left out; None for a sample that is kept."""
    length = len(sample.input_ids)
    prompt = sample.spans[0][0] if sample.spans else length
    if prompt == 0:
        return "have no token before the first trained one"
    if prompt > data.prompt_tokens:
        return f"have prompts longer than data.prompt_tokens={data.prompt_tokens}"
    if length - prompt > data.response_tokens:
        return f"have answers longer than data.response_tokens={data.response_tokens}"
    if context is not None and length + (0 if sample.spans else data.response_tokens) > context:
        room = "" if sample.spans else f" with data.response_tokens={data.response_tokens} after them"
        return f"do not fit the target's context of {context}{room}"
    return None


def is_beyond(ids: list[int], chat: Chat) -> bool:
    """Return whether a text has a token that the target has no embedding for: its tokenizer may have more tokens."""
    return chat.vocab_size is not None and max(ids, default=0) >= chat.vocab_size


def require_embeddings(ids: list[int], chat: Chat, place: str) -> None:
    """Raise LeftOut with the text's place for the largest token that the target has no embedding for."""
    if is_beyond(ids, chat):
        token = chat.tokenizer.convert_ids_to_tokens(max(ids))
        expected = f"expected text without it, whose ids are below the target's {chat.vocab_size} embeddings"
        reason = f"have a token beyond the target's {chat.vocab_size} embeddings"
        raise LeftOut(f"{place}: token {max(ids)} ({token!r}); {expected}", reason)


def _turns(dialogue: Conversation, every_turn: bool) -> str:
    """Return the user's turns and the tools as JSON; '' for plain text."""
    if not dialogue.messages:
        return ""
    turns = dialogue.turns if every_turn else dialogue.turns[:1]
    return json.dumps({"turns": turns, "tools": dialogue.tools}, default=str)  # tables have dates


def _embedded(chat: Chat, data: DataSection, seed: int) -> Dataset:
    """Return windows of the embedded corpus; the answer is the continuation of the text."""
    prompt = data.prompt_tokens
    window = prompt + (data.response_tokens if data.answered else 0)
    rows = embedded_prompts(chat.tokenizer, "train", data.count, window, seed)
    spans = [[prompt, window]] if data.answered else []
    same = {"spans": spans, "turns": "", "images": ""} | ({"marked": []} if data.prompts_trained else {})
    return Dataset.from_list(
        [{**same, "input_ids": row.input_ids, "opening": row.id} for row in rows], features=_features(data)
    )


class HeldOut(NamedTuple):
    """A prompt that is kept out of training; `images`: see `FEATURES`; `source`: its index."""

    input_ids: list[int]
    images: str = ""
    source: int = 0


def hold_out(examples: Dataset, count: int) -> tuple[Dataset, list[HeldOut]]:
    """Return the training examples, and the first prompts of the last `count` conversations, which are held out.

    All rows of conversations that begin like a held-out one are removed from the training examples.

    Raises:
        ConfigError: if no training example would be left.
    """
    openings = list(dict.fromkeys(reversed(examples["opening"])))
    if len(openings) <= count:
        raise ConfigError(
            f"data.prompts holds {len(openings)} usable prompts; expected more than evaluation.count={count}, which "
            "are kept out of training (or name a file in evaluation.prompts)"
        )
    held = set(openings[:count])
    prompts: dict[str, HeldOut] = {}
    kept = []
    for index, opening in enumerate(examples["opening"]):
        if opening not in held:
            kept.append(index)
        elif opening not in prompts:
            row = examples[index]
            ids = row["input_ids"][: row["spans"][0][0]] if row["spans"] else row["input_ids"]
            prompts[opening] = HeldOut(ids, row.get("images", ""), row.get("source", 0))
    return examples.select(kept), list(prompts.values())


def hold_back(rows: Dataset, count: int) -> tuple[Dataset, Dataset]:
    """Return the rows of all prompts but the last `count`, and theirs.

    Raises:
        ConfigError: if no row would be left for training.
    """
    prompts = rows["question" if "question" in rows.column_names else "opening"]
    held = set(list(dict.fromkeys(reversed(prompts)))[:count])
    kept = [index for index, prompt in enumerate(prompts) if prompt not in held]
    if not kept:
        raise ConfigError(f"data.validation={count} with samples of {len(held)} prompts; expected fewer than those")
    return rows.select(kept), rows.select([index for index, prompt in enumerate(prompts) if prompt in held])


class LengthStatistics(NamedTuple):
    """Numbers of samples and tokens, and percentiles of the samples' lengths in tokens."""

    samples: int
    tokens: int
    trained: int
    p5: int
    p50: int
    p95: int
    longest: int


def length_statistics(rows: Dataset) -> LengthStatistics:
    """Return the number and the lengths of the samples in `rows`."""
    lengths = sorted(map(len, rows["input_ids"]))
    trained = sum(end - start for spans in rows["spans"] for start, end in spans)
    p5, p50, p95 = (lengths[min(len(lengths) - 1, q * len(lengths) // 100)] for q in (5, 50, 95))
    return LengthStatistics(len(lengths), sum(lengths), trained, p5, p50, p95, lengths[-1])
