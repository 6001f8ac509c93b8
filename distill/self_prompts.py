"""Prompts that the target writes itself: the user's turn of its chat template, sampled (Magpie, arXiv:2406.08464).

Without more the target writes prompts of few kinds: 9 % of SmolLM2's mention code. A system prompt before the turn asks
for a kind (section 2.2 there); 56 % do with that for code.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from datasets import Dataset

from draftsmith.distill.chat_template import Chat
from draftsmith.distill.conversation import Conversation
from draftsmith.distill.data_section import SELF, DataSection, Kind
from draftsmith.distill.dataset import FEATURES
from draftsmith.distill.load_target import LoadedTarget
from draftsmith.distill.regeneration import Sampler, Share, target_samples
from draftsmith.distill.sources import read_source
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.model_config import decoding_limit, eos_tokens
from draftsmith.provenance import fingerprint
from draftsmith.storage import cache_dir, write_text, writing

VERSION = 1
KINDS: dict[Kind, str] = {
    "code": "You are an assistant for programmers. The user asks for code in a programming language, or shows code.",
    "math": "You are an assistant for mathematics. The user poses a problem with numbers, or an equation to solve.",
    "writing": "You are an assistant for writers. The user asks for a story, an essay, a poem or a letter.",
    "extraction": "You are an assistant for readers. The user shows a text and asks for its summary or for facts.",
}
"""By kind, the system prompt before the user's turn."""
SIGNS: dict[Kind, str] = {
    "code": r"code|function|python|java|javascript|sql|html|css|script|program\w*|algorithm|c\+\+|api|class|array|```",
    "math": r"equations?|solve|calculate|how (?:many|much|far|long|old)|sum|average|total|percent(?:age)?|probability|"
    r"triangle|integral|derivative|prove|f\(x\)|\d+ ?[-+*/^=] ?\d+",
    "writing": r"write|essay|story|poem|letter|email|blog|edit|rewrite|paragraph|speech|describe",
    "extraction": r"summar\w*|extract|text|passage|article|list|identify|classify|key points|main",
}
"""By kind, words that count as its signs.

Of GSM8K's questions 95 % have a word of math and 3 % one of code, of HumanEval's prompts 26 % and 46 %.
"""
PLACEHOLDER = "\ue001"
MOST = 8
"""Texts that are sampled for each prompt that is wanted, before giving up."""


def write_self_prompts(
    target: LoadedTarget,
    chat: Chat,
    data: DataSection,
    seed: int,
    *,
    share: Share | None = None,
    progress: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return a file of `data.count` prompts, JSON lines with `messages`, that the target sampled at temperature 1.

    With `data.kind`, the number of them that have words of the kind is reported.

    Texts that do not end, are empty, contain special tokens, repeat another or exceed `data.prompt_tokens` in the
    template are left out and counted. The file and the samples are cached; a larger count samples only what is missing.

    Raises:
        ConfigError: for a target without a chat template, a template that does not show the user's text, a longest
            prompt without room for text, and a target of which fewer than one text in `MOST` is usable.
    """
    share = share or Share()
    header, longest, count = turn_header(chat, data.kind), data.prompt_tokens, data.count
    before, limit = len(turn_header(chat)), decoding_limit(target.model.config)
    room = longest - before  # prompts are read without the system prompt
    room = room if limit is None else min(room, limit - len(header))
    if room <= 0:
        raise ConfigError(
            f"data.prompt_tokens={longest} with data.prompts={SELF!r}; expected more than the {before} tokens "
            f"of the chat template before the user's text, and a target that reads more than {len(header)}"
        )
    drawn = {"response_tokens": room, "temperature": 1.0, "responses": 1}
    sampler = Sampler(target, chat, data.model_copy(update=drawn), seed)
    key = fingerprint([VERSION, sampler.target_key(_headers(header, 1)), chat.key(), header, count, longest])
    file = cache_dir() / "self-prompts" / f"{key}.jsonl"
    share.wait()  # all processes decide alike: the file is written after the next one
    if file.is_file():
        _say_signs(data, file, say)
        return file
    asked = count
    while True:
        rows = target_samples(sampler, _headers(header, asked), share=share, progress=progress)
        texts, left_out = _usable(rows, sampler, longest)
        if len(texts) >= count or asked >= MOST * count:
            break
        asked = min(MOST * count, math.ceil(1.1 * asked * count / max(1, len(texts))))
    reasons = "".join(f", {number:,} {reason}" for reason, number in sorted(left_out.items()))
    say(f"data: the target wrote {asked:,} texts as prompts: {len(texts):,} usable{reasons}")
    if len(texts) < count:
        raise ConfigError(
            f"data.count={count:,} with data.prompts={SELF!r}: of {asked:,} texts {len(texts):,} are usable{reasons}; "
            "expected a smaller data.count, a larger data.prompt_tokens, or a file of prompts"
        )
    if share.first:
        lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts[:count]]
        with writing(file, "the samples are kept, and the same command writes their prompts once there is room"):
            write_text(file, "".join(lines))
    share.wait()
    _say_signs(data, file, say)
    return file


def _say_signs(data: DataSection, file: Path, say: Callable[[str], None]) -> None:
    """Print how many prompts in the file have words of their kind, if they are of one."""
    if data.kind is not None:
        texts = [row["messages"][0]["content"] for _, row in read_source(str(file))]
        like = sum(has_signs(data.kind, text) for text in texts)
        say(f"data: {data.label}: {like:,} of {len(texts):,} prompts have words of {data.kind}")


def has_signs(kind: Kind, text: str) -> bool:
    """Return whether a text has a word of the kind."""
    return re.search(rf"(?<!\w)(?:{SIGNS[kind]})(?!\w)", text, re.IGNORECASE) is not None


def turn_header(chat: Chat, kind: Kind | None = None) -> list[int]:
    """Return the tokens of the chat template before the text of the first user turn.

    `kind`: a key of `KINDS`, whose system prompt comes before the turn.

    Raises:
        ConfigError: for a tokenizer without a template, or with one that does not show the system prompt or the user's
            text.
    """
    if not chat.tokenizer.chat_template:
        raise ConfigError(
            f"data.prompts={SELF!r} with a tokenizer without a chat template; expected a file of prompts, or "
            "data.chat_template"
        )
    messages = [{"role": "user", "content": PLACEHOLDER}]
    if kind is not None:
        messages = [{"role": "system", "content": KINDS[kind]}, *messages]
    try:
        whole = str(chat.tokenizer.apply_chat_template(messages, tokenize=False, **chat.options))
    except Exception as error:  # expressions of a template may raise anything
        raise ConfigError(
            f"data.prompts={SELF!r}{'' if kind is None else f', kind={kind}'}: the chat template refuses these turns "
            f"({reason_of(error)}); expected a file of prompts"
        ) from error
    before, found, _ = whole.partition(PLACEHOLDER)
    if not found or not before:
        raise ConfigError(
            f"data.prompts={SELF!r}: the chat template shows nothing before the user's text; expected a file of prompts"
        )
    if kind is not None and KINDS[kind] not in before:
        raise ConfigError(f"kind={kind}: the chat template shows no system prompt; expected {SELF!r} without a kind")
    return list(chat.tokenizer(before, add_special_tokens=False)["input_ids"])


def _headers(header: list[int], count: int) -> Dataset:
    """Return `count` equal questions; each has a seed of its own, from its place among its equals."""
    row = {"input_ids": header, "spans": [], "opening": "", "turns": "", "images": ""}
    return Dataset.from_list([row] * count, features=FEATURES)


def _usable(rows: Dataset, sampler: Sampler, longest: int) -> tuple[list[str], Counter[str]]:
    """Return the texts that can be asked, in their order, and the counts of the others by reason."""
    chat, model, texts, left_out = sampler.chat, sampler.target.model, dict[str, None](), Counter[str]()
    special = set(chat.tokenizer.all_special_ids)
    ends = eos_tokens(model.config, model.generation_config)
    for ids in _written(rows):
        text = str(chat.tokenizer.decode(ids[:-1], skip_special_tokens=True)).strip()
        if ids[-1] not in ends:
            left_out["without an end"] += 1
        elif special & set(ids[:-1]):
            left_out["with special tokens"] += 1
        elif not text:
            left_out["empty"] += 1
        elif text in texts:
            left_out["repeated"] += 1
        elif len(chat.generation_prompt([{"role": "user", "content": text}], Conversation("prompt"))) > longest:
            left_out[f"longer than data.prompt_tokens={longest}"] += 1
        else:
            texts[text] = None
    return list(texts), left_out


def _written(rows: Dataset) -> Iterator[list[int]]:
    for ids, spans in zip(rows["input_ids"], rows["spans"], strict=True):
        start, end = spans[0]
        yield ids[start:end]
