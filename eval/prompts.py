"""Prompt sets (the embedded held-out text, a file or a Hub data set), and their batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.distill.chat_template import LONGEST_TEXT, Chat, characters
from draftsmith.distill.conversation import Conversation, LeftOut, question
from draftsmith.distill.dataset import require_embeddings
from draftsmith.distill.embedded import embedded_prompts
from draftsmith.distill.messages import ASSISTANT
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import ProcessorInputs, inputs_fingerprint
from draftsmith.names import EMBEDDED
from draftsmith.provenance import fingerprint

EMBEDDED_PROMPT_TOKENS = 48
ANY_TIME = datetime(2000, 1, 1)
UNCATEGORISED = "uncategorised"
OVERALL = "all"
"""Category of the rows over all prompts."""
MT_BENCH = frozenset(("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"))
SPEC_BENCH = frozenset(("translation", "summarization", "qa", "math_reasoning", "rag"))
"""Spec-Bench's other five categories (Xia et al. 2024, arXiv:2401.07851)."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt as token ids, its category, and its later turns."""

    id: str
    category: str
    input_ids: list[int]
    conversation: Conversation | None = None
    """The conversation of a prompt with several turns; None for one turn."""
    inputs: ProcessorInputs | None = field(default=None, compare=False, repr=False)
    """The processor's tensors of a prompt with images."""
    now: datetime | None = None
    """The time that a chat template shows; None for other templates."""
    timeless: list[int] | None = None
    """The token ids with another time, the same for every evaluation."""

    @property
    def turns(self) -> int:
        return 1 if self.conversation is None else len(self.conversation.turns)

    def after(self, answers: list[list[int]], chat: Chat | None) -> "Prompt":
        """Return the prompt of the conversation up to the turn after `answers` (token ids each)."""
        ids, inputs, asked = self.input_ids, self.inputs, self.conversation
        if not answers:
            return self
        assert asked is not None, "only prompts of several turns have answers"
        assert chat is not None
        chat = chat if self.now is None else replace(chat, now=self.now)
        messages = list(asked.turns[0])
        for answer, turn in zip(answers, asked.turns[1:], strict=False):
            content = chat.answer(messages, asked, ids, answer)
            messages += [{"role": ASSISTANT, "content": content}, *turn]
            ids, inputs = chat.prompt_inputs(messages, asked)
        return replace(self, input_ids=ids, inputs=inputs)


@dataclass(frozen=True)
class _Row:
    id: str
    category: str
    asked: Conversation


@dataclass(frozen=True)
class PromptRows:
    """The checked rows of a prompt set before tokenization; None for the embedded text."""

    rows: list[_Row] | None
    unasked: tuple[LeftOut, ...] = ()
    """Errors of the rows without a question."""

    @property
    def images(self) -> bool:
        """Some prompt has an image."""
        return any(row.asked.images for row in self.rows or ())

    @classmethod
    def read(
        cls, source: str, subset: str | None = None, split: str = "train", images: str | None = None
    ) -> "PromptRows":
        """Read the rows of `source`: "embedded", a file or a Hub data set.

        Rows with `turns` (Spec-Bench, MT-Bench) or messages go through the chat template, and every turn is asked; rows
        with `prompt` (HumanEval), `question` (GSM8K), `instruction` or `text` are continued as they are. `category` and
        an id (`question_id`, `task_id` or `id`) are read where a row has them. `images`: folder of the images that
        messages name; default: the folder of the file.

        Raises:
            ConfigError: naming the line of a malformed row or of a repeated id, or if no row has a question.
        """
        if source == EMBEDDED:
            return cls(None)
        return cls(*_read(source, subset, split, None if images is None else Path(images)))

    def encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        count: int | None = None,
        context: int | None = None,
        vocab_size: int | None = None,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        processor: Any = None,
        now: datetime | None = None,
        encodes: bool = False,
    ) -> tuple[list[Prompt], list[str]]:
        """Return at most `count` prompts as token ids (default: all of a file, 12 of the embedded text), and notes.

        Fewer prompts than rows are taken in turn from the categories, in the order of the file. Prompts whose first
        question fills a context of `context` tokens, those with a token that is no id below `vocab_size`, the number of
        the target's embeddings, and those that the chat template refuses, are left out, which a note says.
        `processor`: the target's, for prompts with images. `now`: the time for chat templates that show it; default:
        the current one. `encodes`: see `Chat`.

        Raises:
            ConfigError: naming the line of a prompt that cannot be encoded, or of the first one where all are left out
                or the chat template refuses more than half.
        """
        if self.rows is None:
            rows = embedded_prompts(tokenizer, "heldout", count or 12, EMBEDDED_PROMPT_TOKENS, seed=1)
            return [Prompt(row.id, row.category, row.input_ids) for row in rows], []
        longest = LONGEST_TEXT if context is None else characters(context)
        how: dict[str, Any] = {"processor": processor, "encodes": encodes, "vocab_size": vocab_size}
        chat = Chat(tokenizer, chat_template, template_options or {}, longest, **how, now=now or datetime.now())
        rows, prompts, unasked = _spread(self.rows, count), list[Prompt](), [*self.unasked]
        for row in rows:
            try:
                prompts.append(_tokens(row, chat, context))
            except LeftOut as error:
                unasked.append(error)
        of = len(rows) + len(self.unasked)
        faulty = [error for error in unasked if error.faulty]
        if unasked and (not prompts or len(faulty) > of / 2):
            raise faulty[0] if len(faulty) > of / 2 else unasked[0]
        return prompts, [left_out(len(unasked), of, str(unasked[0]))] if unasked else []


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    context: int | None = None,
    chat_template: str | None = None,
    template_options: dict[str, Any] | None = None,
    now: datetime | None = None,
) -> list[Prompt]:
    """Return the prompts of `source`; see `PromptRows.read` and `PromptRows.encode` for arguments and errors."""
    how: dict[str, Any] = {"chat_template": chat_template, "template_options": template_options, "now": now}
    return PromptRows.read(source).encode(tokenizer, count=count, context=context, **how)[0]


def left_out(count: int, of: int, first: str) -> str:
    """Return a note about prompts that are not measured; `first`: the reason for the first of them."""
    return f"{count} of {of} prompts were left out; the first: {first}."


def _name(row: dict[str, Any], number: int) -> str:
    return str(next((row[key] for key in ("question_id", "task_id", "id") if row.get(key) is not None), f"#{number}"))


def _read(source: str, subset: str | None, split: str, images: Path | None) -> tuple[list[_Row], tuple[LeftOut, ...]]:
    rows, unasked, places = list[_Row](), list[LeftOut](), {}
    for number, (place, row) in enumerate(read_source(source, subset, split), 1):
        try:
            asked = question(place, row, images)
        except LeftOut as error:
            unasked.append(error)
            continue
        name = _name(row, number)
        if name in places:
            raise ConfigError(f"{place}: id={name!r} is also the id of {places[name]}; expected each only once")
        places[name] = place
        category = str(row.get("category") or UNCATEGORISED)
        rows.append(_Row(name, UNCATEGORISED if category == OVERALL else category, asked))
    if unasked and not rows:
        raise unasked[0]
    return _as_spec_bench(rows), tuple(unasked)


def _as_spec_bench(rows: list[_Row]) -> list[_Row]:
    """Merge MT-Bench's eight categories into one for Spec-Bench, as its authors do; MT-Bench alone keeps them."""
    categories = {row.category for row in rows}
    if not categories & SPEC_BENCH or categories - SPEC_BENCH - MT_BENCH:
        return rows
    return [replace(row, category="mt_bench") if row.category in MT_BENCH else row for row in rows]


def _spread(rows: list[_Row], count: int | None) -> list[_Row]:
    """Return `count` rows in their order: the first of each category, then the second of each, and so on."""
    if count is None or count >= len(rows):
        return rows
    seen: dict[str, int] = {}
    ranks = []
    for place, row in enumerate(rows):
        seen[row.category] = seen.get(row.category, 0) + 1
        ranks.append((seen[row.category], place))
    return [rows[place] for place in sorted(place for _, place in sorted(ranks)[:count])]


def _tokens(row: _Row, chat: Chat, context: int | None) -> Prompt:
    asked = row.asked

    def ids_with(chat: Chat) -> tuple[list[int], ProcessorInputs | None]:
        return chat.prompt_inputs(asked.asked, asked) if asked.images else (chat.prompt(asked), None)

    ids, inputs = ids_with(chat)
    turns = len(asked.turns)
    prompt = Prompt(row.id, row.category, ids, asked if turns > 1 else None, inputs)
    if chat.shows_time:
        prompt = replace(prompt, now=chat.now, timeless=ids_with(replace(chat, now=ANY_TIME))[0])
    if context is not None and len(ids) >= context:
        long = f"{asked.place}: prompt={len(ids)} tokens; expected fewer than the context of {context}"
        raise LeftOut(long, "do not fit the context")
    if not ids:
        raise ConfigError(f"{asked.place}: prompt=0 tokens; expected at least 1")
    later = prompt.after([[]] * (turns - 1), chat)  # raises here for later turns that the template refuses
    require_embeddings(later.input_ids, chat, asked.place)
    return prompt


def prompts_fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a fingerprint of everything in the prompts that decoded texts depend on, but the time that they show."""
    asked: list[list[Any]] = []
    for p in prompts:
        images = [] if p.inputs is None else [inputs_fingerprint(p.inputs)]
        ids = p.input_ids if p.timeless is None else p.timeless
        asked.append([p.id, p.category, ids, None if p.conversation is None else p.conversation.turns, *images])
    return fingerprint(asked)


def time_of(prompts: Iterable[Prompt]) -> dict[str, str]:
    """Return `now`, the time that the prompts show, for the first line of a journal; empty where they show none."""
    times = [prompt.now for prompt in prompts if prompt.now is not None]
    return {"now": times[0].isoformat()} if times else {}


@dataclass(frozen=True)
class PromptBatch:
    """Prompts that are decoded together."""

    prompts: list[Prompt]
    category: str | None
    """None for prompts of several categories, which count only towards `OVERALL`."""

    @property
    def turns(self) -> int:
        return max(prompt.turns for prompt in self.prompts)


def batches(prompts: list[Prompt], size: int) -> list[PromptBatch]:
    """Return full batches of one category each, then batches of the remaining prompts; the last may not be full."""
    full, rest = [], []
    for category, group in groupby(sorted(prompts, key=lambda p: p.category), key=lambda p: p.category):
        members = list(group)
        end = len(members) - len(members) % size
        full += [PromptBatch(members[start : start + size], category) for start in range(0, end, size)]
        rest += members[end:]
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        categories = {prompt.category for prompt in part}
        full.append(PromptBatch(part, categories.pop() if len(categories) == 1 else None))
    return full
