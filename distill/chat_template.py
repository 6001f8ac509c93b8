"""Conversations as tokens, and which of them the target would have written: what a drafter is trained on.

Which tokens are the assistant's comes from the chat template itself: from its `{% generation %}` blocks where it has
them, else from rendering each conversation up to a turn and behind it. Text is never searched for markers.
"""

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.distill.detokenize import text_after
from draftsmith.distill.sources import ASSISTANT, Conversation, Message
from draftsmith.errors import ConfigError, reason_of
from draftsmith.provenance import tokenizer_fingerprint
from draftsmith.reading import read_text

SHIPPED = ("vicuna",)
"""Templates in distill/templates, of models whose tokenizer brings none."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACEHOLDER = "\ue000"
RENDERING_SECONDS = 5.0
"""That a chat template may compute for one conversation."""
LARGEST_TEMPLATE = 2**20
"""Bytes."""
LONGEST_TEXT = 2**22
"""Characters that are tokenised as one text."""
CHARACTERS = 128
"""More than tokens have on average in any text: what is longer than so many times a limit in tokens is beyond it."""
Span = list[int]
"""[start, end) of tokens that are trained; the token before `start` is read first."""


class TooLongText(ConfigError):
    """A text of so many characters that it is not even tokenised."""


def characters(tokens: int) -> int:
    """Return how many characters a text of at most `tokens` tokens may have to be tokenised."""
    return min(LONGEST_TEXT, CHARACTERS * tokens)


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the spans of them that the target is to be agreed with on."""

    input_ids: list[int]
    spans: list[Span]

    @property
    def trained(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Chat:
    """A tokenizer with the chat template that conversations go through.

    Args:
        template: another template than the tokenizer's: a file, or the name of one of `SHIPPED`.
        options: what the template is given beside the messages, such as `enable_thinking`.
        longest: characters of a text; tokenising a longer one raises `TooLongText`.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = LONGEST_TEXT

    def __post_init__(self) -> None:
        if self.template is None:
            return
        self.tokenizer.chat_template = template_text(self.template)

    def prompt(self, asked: Conversation) -> list[int]:
        """Tokens behind which the target writes its first answer."""
        if asked.messages:
            return self.behind(asked.asked, asked)
        return self.plain(asked.text, asked.place)

    def plain(self, text: str, place: str = "text") -> list[int]:
        """Tokens of text that no template has to do with."""
        return self._ids(text, place)

    def behind(self, messages: list[Message], of: Conversation) -> list[int]:
        """Tokens of messages and of what opens an answer; without a template, the messages one below the other."""
        if not self.tokenizer.chat_template:
            return self.plain("\n".join(str(message["content"]) for message in messages), of.place)
        return self._ids(self._render(messages, of, opened=True), of.place, add_special_tokens=False)

    def answer(self, messages: list[Message], of: Conversation, prompt: list[int], tokens: list[int]) -> str:
        """Return the content of the message whose tokens were generated after `prompt`, which shows `messages`.

        The template writes it after the same prompt again, so what the template itself writes there is left out.
        """
        text = text_after(self.tokenizer, prompt, tokens)
        if not self.tokenizer.chat_template:
            return text
        opened = self._render(messages, of, opened=True)
        whole = self._render([*messages, {"role": ASSISTANT, "content": PLACEHOLDER}], of, opened=False)
        return text.removeprefix(whole[len(opened) :].partition(PLACEHOLDER)[0]) if whole.startswith(opened) else text

    def encode(self, whole: Conversation, prompt_tokens: int) -> list[Encoded]:
        """A conversation with its answers as tokens; several where the template shows a turn's past differently later.

        A lone text is read for at most `prompt_tokens` tokens, at most half of it, and trained from there on.

        Raises:
            ConfigError: for one without an answer, or a template from which the answers cannot be told.
        """
        if whole.input_ids is not None and whole.tokenizer in (None, tokenizer_fingerprint(self.tokenizer)):
            return [_checked(whole, len(self.tokenizer))]
        if not whole.messages:
            return [self._text(whole, prompt_tokens)]
        if not any(message["role"] == ASSISTANT for message in whole.messages):
            raise _unanswered(whole.place)
        if not self.tokenizer.chat_template:
            return [self._first_answer(whole)]
        if GENERATION.search(str(self.tokenizer.chat_template)):
            return [self._marked(whole)]
        return self._turn_by_turn(whole)

    def _text(self, whole: Conversation, prompt_tokens: int) -> Encoded:
        if not whole.whole:
            return self._answered(self.plain(whole.text, whole.place), whole.answer or "", whole.place)
        ids = self.plain(whole.text, whole.place)
        cut = min(prompt_tokens, len(ids) // 2)
        return Encoded(ids, [[cut, len(ids)]])

    def _first_answer(self, whole: Conversation) -> Encoded:
        """Targets without a template have not learned to hold conversations: the first answer alone."""
        answer = next(message["content"] for message in whole.messages if message["role"] == ASSISTANT)
        return self._answered(self.behind(whole.asked, whole), str(answer), whole.place)

    def _answered(self, prompt: list[int], answer: str, place: str) -> Encoded:
        ids, unspaced = (
            self._ids(text, place, add_special_tokens=False) for text in (answer, answer.removeprefix(" "))
        )
        if ids != unspaced and text_after(self.tokenizer, prompt, unspaced) == answer:
            ids = unspaced  # sentencepiece tokenizers put a space before the first word by themselves
        if not ids:
            raise _unanswered(place)
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        ids = [*prompt, *ids, *end]
        return Encoded(ids, [[len(prompt), len(ids)]])

    def _marked(self, whole: Conversation) -> Encoded:
        """By the template's `{% generation %}` blocks."""
        self._require_tokenisable(self._render(whole.messages, whole, opened=False), whole.place)
        found = self._apply(whole.messages, whole, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        spans: list[Span] = []
        for place, marked in enumerate(found["assistant_masks"]):
            if marked and spans and spans[-1][1] == place:
                spans[-1][1] += 1
            elif marked:
                spans.append([place, place + 1])
        if not spans:
            raise ConfigError(
                f"{whole.place}: the chat template's generation blocks mark no token; expected the assistant's answers "
                "inside them (data.chat_template names another template)"
            )
        ids = list(found["input_ids"])
        return Encoded(ids, [self._until_eos(ids, *span) for span in spans])

    def _turn_by_turn(self, whole: Conversation) -> list[Encoded]:
        """By rendering up to each answer and behind it.

        Behind a later turn some templates show an earlier one differently (its thinking is left out): the earlier turn
        is then a sample of its own, which ends where the target ended.
        """
        samples: list[Encoded] = []
        for index, message in enumerate(whole.messages):
            if message["role"] != ASSISTANT:
                continue
            opened = self._render(whole.messages[:index], whole, opened=True)
            behind = self._render(whole.messages[: index + 1], whole, opened=False)
            before = opened if behind.startswith(opened) else self._render(whole.messages[:index], whole, opened=False)
            if not behind.startswith(before) or behind == before:
                raise ConfigError(
                    f"{whole.place}: the chat template does not show message {index + 1} behind the ones before it, so "
                    "its answers cannot be told; expected a template with generation blocks (data.chat_template)"
                )
            first, ids = (self._ids(text, whole.place, add_special_tokens=False) for text in (before, behind))
            start = next((i for i, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), len(first))
            sample = Encoded(ids, [self._until_eos(ids, start, len(ids))])
            last = samples[-1] if samples else None
            if last is not None and ids[: len(last.input_ids)] == last.input_ids:
                samples[-1] = Encoded(ids, [*last.spans, *sample.spans])
            else:
                samples.append(sample)
        return samples

    def _until_eos(self, ids: list[int], start: int, end: int) -> Span:
        """Templates write a line break behind the end of a turn; the target stops before it."""
        places = [place for place in range(start, end) if ids[place] == self.tokenizer.eos_token_id]
        return [start, places[-1] + 1 if places else end]

    def _render(self, messages: list[Message], of: Conversation, *, opened: bool) -> str:
        return self._apply(messages, of, tokenize=False, add_generation_prompt=opened)

    def _apply(self, messages: list[Message], of: Conversation, **how: Any) -> Any:
        try:
            with _computing_at_most(RENDERING_SECONDS):
                return self.tokenizer.apply_chat_template(messages, tools=of.tools, **how, **self.options)
        except _OutOfTime as error:
            raise ConfigError(
                f"{of.place}: the chat template still computes after {RENDERING_SECONDS:g} seconds; expected one that "
                "ends (data.chat_template names another template)"
            ) from error
        except Exception as error:  # a template may raise whatever its expressions come to
            raise ConfigError(
                f"{of.place}: the chat template refuses it ({reason_of(error)}); expected what it takes"
            ) from error

    def _ids(self, text: str, place: str, **how: Any) -> list[int]:
        self._require_tokenisable(text, place)
        return self.tokenizer(text, verbose=False, **how)["input_ids"]

    def _require_tokenisable(self, text: str, place: str) -> None:
        if len(text) > self.longest:
            raise TooLongText(f"{place}: {len(text)} characters; expected at most {self.longest}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{place}: unpaired surrogate {text[error.start]!r}; expected Unicode") from error


def _unanswered(place: str) -> ConfigError:
    return ConfigError(
        f"{place}: no answer; data.response='text' expected a 'text', an assistant message, or 'response', "
        "'completion', 'answer' or 'output'; with data.response='target' the target answers"
    )


def _checked(whole: Conversation, vocab_size: int) -> Encoded:
    """Tokens as a file keeps them."""
    ids, spans = whole.input_ids or [], whole.spans or []
    good = _whole_numbers(ids) and isinstance(spans, list) and len(spans) > 0 and all(map(_whole_numbers, spans))
    if not good or any(len(span) != 2 or not 0 < span[0] < span[1] <= len(ids) for span in spans):
        raise ConfigError(f"{whole.place}: spans={spans}; expected [start, end] inside its 'input_ids'")
    if not all(0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{whole.place}: input_ids={ids}; expected token ids below {vocab_size}")
    return Encoded(ids, spans)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


class _OutOfTime(BaseException):
    """No Exception, so that nothing in between catches it."""


@contextmanager
def _computing_at_most(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` in the block once the process has computed for `seconds` in it, however busy the machine is.

    Without effect where Python delivers no signals: outside of the main thread, and on Windows.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def template_text(name: str) -> str:
    """A chat template from a file or by its name; ConfigError for one that cannot be read."""
    if name in SHIPPED:
        return files("draftsmith.distill").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")
    try:
        return read_text(Path(name).expanduser(), LARGEST_TEMPLATE)
    except (OSError, ValueError) as error:
        known = ", ".join(SHIPPED)
        raise ConfigError(
            f"chat_template={name} cannot be read ({error}); expected a file, or one of {known}"
        ) from error
