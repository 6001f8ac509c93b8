"""Tokenise conversations with a chat template, and mark the assistant's tokens, on which a drafter is trained.

The assistant's tokens follow from the chat template: from its `{% generation %}` blocks if it has them, else from
rendering each conversation up to a turn and including it. Text is never searched for markers.
"""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.distill.conversation import Conversation, mask_spans
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.messages import ASSISTANT, Message, as_parts, images_in, opened, with_arguments
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import ProcessorInputs, inputs_fingerprint
from draftsmith.heads.model_config import known_tokens
from draftsmith.names import PLAIN, TEMPLATES
from draftsmith.provenance import encoding_fingerprint, tokenizer_fingerprint
from draftsmith.reading import read_text

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLACEHOLDER = "\ue000"
TIME = re.compile(r"\bstrftime_now\(\s*(['\"])(.*?)\1\s*\)")
"""The call with which chat templates show the date."""
LARGEST_TEMPLATE = 2**20
"""Bytes."""
OPENED, CLOSED = (re.compile(rf"({begin}[a-z_]*(?:think|thought|reason)[a-z_]*>)(\s*)$") for begin in ("<", "</"))
"""The end of a generation prompt that begins the thinking, and of one that ends it, as for answers without any."""
LONGEST_TEXT = 2**22
"""Characters of a text that is tokenised."""
CHARACTERS = 128
"""Characters per token, more than the average of any text: a longer text exceeds a limit in tokens for certain."""
Span = list[int]
"""[start, end) of tokens to train on; the token before `start` is only read."""
EVERYTHING = [0, 2**31 - 1]
"""The span of all tokens of a text, and of what is appended to it."""


class TooLongText(ConfigError):
    """A text with too many characters to be tokenised."""


class TemplateRefusal(ConfigError):
    """A conversation that the chat template refuses, or in which it does not show an answer.

    Args:
        reason: the end of "rows that …".
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ImageAfterAnswer(ConfigError):
    """A conversation that cannot be trained on, because an image follows an answer."""


def characters(tokens: int) -> int:
    """Return the length in characters up to which a text is tokenised where a limit of `tokens` tokens applies."""
    return min(LONGEST_TEXT, CHARACTERS * tokens)


@dataclass(frozen=True)
class EncodedText:
    """Token ids, and the spans of them that a drafter is trained on."""

    input_ids: list[int]
    spans: list[Span]
    masked: int = 0
    """Tokens of the answers that are not trained, because the tokenizer has no such id."""

    @property
    def trained(self) -> int:
        return sum(end - start for start, end in self.spans)


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template.

    Args:
        template: replaces the tokenizer's template: a file, or one of `names.TEMPLATES`.
        options: arguments of the template besides the messages, such as `enable_thinking`.
        longest: most characters of a text; tokenising a longer one raises `TooLongText`.
        processor: the target's, for messages with images.
        ends: tokens that end the target's answers, besides the tokenizer's EOS.
        now: the time for templates that show it; default: when they are rendered.
        vocab_size: ids that the target reads, of which the tokenizer may have fewer; default: the tokenizer's.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = LONGEST_TEXT
    processor: Any = None
    ends: frozenset[int] = frozenset()
    now: datetime | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.template is not None:
            self.tokenizer.chat_template = template_text(self.template) or None
        if self.processor is not None:
            own = None if self.template is not None else self.processor.chat_template
            self.processor.chat_template = self.tokenizer.chat_template = own or self.tokenizer.chat_template

    def key(self) -> list[Any]:
        """Return the settings on which the tokens of a conversation depend; for cache keys."""
        template = str(self.tokenizer.chat_template)
        return [encoding_fingerprint(self.tokenizer), template, self.options, sorted(self.ends)]

    @cached_property
    def known(self) -> int:
        """The number after the tokenizer's last id."""
        return known_tokens(self.tokenizer)

    @property
    def shows_time(self) -> bool:
        """Whether the chat template may show the date or the time."""
        return TIME.search(str(self.tokenizer.chat_template)) is not None

    def prompt(self, dialogue: Conversation) -> list[int]:
        """Return the tokens that the target's first answer follows."""
        if dialogue.messages:
            return self.generation_prompt(dialogue.asked, dialogue)
        if not dialogue.text and dialogue.input_ids is not None:
            return next((it.input_ids[: it.spans[0][0]] for it in self.encode(dialogue, 0)), dialogue.input_ids)
        return self.plain(dialogue.text, dialogue.place)

    def plain(self, text: str, place: str = "text") -> list[int]:
        """Return the tokens of a text that goes through no template, with one BOS where the tokenizer adds it."""
        ids, bos = self._ids(text, place), self.tokenizer.bos_token_id
        twice = bos is not None and ids[:2] == [bos, bos] and self.tokenizer("")["input_ids"][:1] == [bos]
        return ids[1:] if twice else ids  # the text began with BOS, as text that a template rendered does

    def generation_prompt(self, messages: list[Message], of: Conversation) -> list[int]:
        """Return the tokens of messages and of the start of an answer; with the template `PLAIN`, of their texts.

        Raises:
            ConfigError: for a tokenizer without a chat template, unless the user has named `PLAIN`.
        """
        _require_text(messages, of)
        if not self.tokenizer.chat_template:
            self._require_plain(of)
            return self.plain("\n".join(str(message["content"]) for message in messages), of.place)
        return self._ids(self._render(messages, of, opened=True), of.place, add_special_tokens=False)

    def prompt_inputs(self, messages: list[Message], of: Conversation) -> tuple[list[int], ProcessorInputs | None]:
        """Return the tokens of `generation_prompt`, and the processor's tensors of the images in the messages.

        Raises:
            ConfigError: for images that cannot be read, or a target without a processor of images.
        """
        sources = images_in(messages)
        if not sources:
            return self.generation_prompt(messages, of), None
        if self.processor is None or not self.processor.chat_template:
            what = "processor" if self.processor is None else "chat template of its processor"
            raise ConfigError(f"{of.place}: an image, and the target has no {what}; expected a vision-language target")
        parts = as_parts(messages, [opened(of.place, source) for source in sources])
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        encoded = self._apply(parts, of, **options)
        inputs = {name: value for name, value in encoded.items() if isinstance(value, Tensor)}
        return inputs.pop("input_ids")[0].tolist(), inputs

    def row_inputs(self, images: str, ids: list[int]) -> ProcessorInputs | None:
        """Return the processor's tensors for a text of a data set.

        Args:
            images: see `FEATURES` of distill/dataset.py; empty for a text without images.
            ids: the text; it begins with the prompt that has the images.

        Raises:
            ConfigError: for images that are not those from which the text was made.
        """
        if not images:
            return None
        row = json.loads(images)
        of = Conversation(row["place"], row["messages"], tools=row["tools"])
        prompt, inputs = self.prompt_inputs(of.messages, of)
        if prompt != ids[: len(prompt)] or inputs_fingerprint(inputs) != row["content"]:
            raise ConfigError(f"{of.place}: an image has changed since its text was read; expected the same images")
        return inputs

    def after_images(self, whole: Conversation, prompt: list[int]) -> list[EncodedText]:
        """Return the samples of a conversation with images before its first answer.

        The template shows each image as one placeholder; the processor's tokens of the prompt take its place.

        Args:
            prompt: the tokens of `prompt_inputs` for the messages before the first answer.
        """
        if images_in(whole.messages[len(whole.asked) :]):
            raise ImageAfterAnswer(f"{whole.place}: an image after an answer; expected images before the first one")
        shown = self._ids(self._render(whole.asked, whole, opened=True), whole.place, add_special_tokens=False)
        if not whole.answers:
            raise _unanswered(whole.place)
        samples, more = [], len(prompt) - len(shown)
        for sample in self._turn_by_turn(whole):
            if sample.input_ids[: len(shown)] != shown or sample.spans[0][0] < len(shown):
                raise _hidden(whole.place, "the prompt with images")
            spans = [[start + more, end + more] for start, end in sample.spans]
            samples.append(EncodedText(prompt + sample.input_ids[len(shown) :], spans))
        return samples

    def answer(self, messages: list[Message], of: Conversation, prompt: list[int], tokens: list[int]) -> str:
        """Return the content of the message whose tokens were generated after `prompt`, which shows `messages`.

        The template adds its own text to the content when the message is rendered, so that text is removed here.
        """
        text = text_after(self.tokenizer, prompt, tokens)
        if not self.tokenizer.chat_template:
            return text
        before = self._render(messages, of, opened=True)
        whole = self._render([*messages, {"role": ASSISTANT, "content": PLACEHOLDER}], of, opened=False)
        return text.removeprefix(whole[len(before) :].partition(PLACEHOLDER)[0]) if whole.startswith(before) else text

    def encode(self, whole: Conversation, prompt_tokens: int) -> list[EncodedText]:
        """Return the tokens of a conversation with its answers; several samples if later turns change earlier ones.

        The first `prompt_tokens` tokens of a plain text, at most half of it, are only read; the rest is trained on.

        Raises:
            ConfigError: for a conversation without an answer, a template that does not show where answers are, or
                images, see `after_images`.
        """
        _require_text(whole.messages, whole)
        if whole.spans == [] and not whole.text and not whole.messages:
            return []
        if whole.input_ids is not None and whole.tokenizer in (None, tokenizer_fingerprint(self.tokenizer)):
            sample = _checked(whole, self.vocab_size or self.known, self.known)
            return [sample] if sample.spans else []
        if not whole.messages:
            return [self._text(whole, prompt_tokens)]
        if not whole.answers:
            raise _unanswered(whole.place)
        if not self.tokenizer.chat_template:
            self._require_plain(whole)
            return [self._first_answer(whole)] if whole.answers[0] in whole.trained else []
        marked = self._marked(whole) if GENERATION.search(str(self.tokenizer.chat_template)) else None
        return self._turn_by_turn(whole) if marked is None else [marked] if marked.spans else []

    def marked_spans(self, whole: Conversation, ids: list[int], count: int) -> list[Span]:
        """Return the spans of those of the first `count` messages that the data marks as not trained, in a sample.

        Everything where the template does not show these messages one after the other.
        """
        spans: list[Span] = []
        for place in sorted(place for place in whole.marked if place < count):
            try:
                before, after = self._shown(whole, place), self._shown(whole, place + 1)
            except ConfigError:
                return [EVERYTHING]
            if len(before) >= len(ids) and before[: len(ids)] == ids:
                break  # the sample ends before
            if ids[: len(after)] != after or after[: len(before)] != before:
                return [EVERYTHING]
            spans.append([len(before), len(after)])
        return spans

    def _shown(self, whole: Conversation, count: int) -> list[int]:
        """Return the tokens of the first messages."""
        shown = self._render(whole.messages[:count], whole, opened=False) if count else ""
        return self._ids(shown, whole.place, add_special_tokens=False)

    def _text(self, whole: Conversation, prompt_tokens: int) -> EncodedText:
        if not whole.whole:
            return self._answered(self.plain(whole.text, whole.place), whole.answer or "", whole.place)
        ids = self.plain(whole.text, whole.place)
        cut = min(prompt_tokens, len(ids) // 2)
        return EncodedText(ids, [[cut, len(ids)]])

    def _first_answer(self, whole: Conversation) -> EncodedText:
        """Return the first answer only: a target without a template is not trained on conversations."""
        answer = whole.messages[whole.answers[0]]["content"]
        return self._answered(self.generation_prompt(whole.asked, whole), str(answer), whole.place)

    def response(self, prompt: list[int], answer: str, place: str) -> list[int]:
        """Return the tokens of a text that follows `prompt`, without EOS."""
        ids, unspaced = (
            self._ids(text, place, add_special_tokens=False) for text in (answer, answer.removeprefix(" "))
        )
        # Sentencepiece tokenizers add a space before the first word.
        return unspaced if ids != unspaced and text_after(self.tokenizer, prompt, unspaced) == answer else ids

    def _answered(self, prompt: list[int], answer: str, place: str) -> EncodedText:
        ids = self.response(prompt, answer, place)
        if not ids:
            raise _unanswered(place)
        end = [] if self.tokenizer.eos_token_id in (None, ids[-1]) else [self.tokenizer.eos_token_id]
        ids = [*prompt, *ids, *end]
        return EncodedText(ids, [[len(prompt), len(ids)]])

    def _marked(self, whole: Conversation) -> EncodedText | None:
        """Take the spans from the template's `{% generation %}` blocks; None where they are not one for each answer.

        Only where some answer is not trained, it matters which block shows which answer.
        """
        self._require_tokenisable(self._render(whole.messages, whole, opened=False), whole.place)
        encoded = self._apply(whole.messages, whole, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        spans = mask_spans(encoded["assistant_masks"])
        if not spans:
            raise TemplateRefusal(
                f"{whole.place}: the chat template's generation blocks mark no token; expected the assistant's answers "
                "inside them (data.chat_template names another template)",
                "have no token in the chat template's generation blocks",
            )
        answers = [place for place, message in enumerate(whole.messages) if message["role"] == ASSISTANT]
        if len(whole.trained) < len(answers):
            if len(spans) != len(answers):
                return None
            spans = [span for span, place in zip(spans, answers, strict=True) if place in whole.trained]
        ids = list(encoded["input_ids"])
        return EncodedText(ids, [self._until_eos(ids, *span) for span in spans])

    def _turn_by_turn(self, whole: Conversation) -> list[EncodedText]:
        """Find the spans by rendering the conversation up to each answer and including it.

        Some templates render an earlier turn differently once a later one follows (without its thinking): the earlier
        turn is then a sample of its own, which ends where the target ended.
        """
        samples: list[EncodedText] = []
        for index in whole.trained:
            sample = self._up_to(whole, index)
            last = samples[-1] if samples else None
            if last is not None and sample.input_ids[: len(last.input_ids)] == last.input_ids:
                samples[-1] = EncodedText(sample.input_ids, [*last.spans, *sample.spans])
            else:
                samples.append(sample)
        return samples

    def _up_to(self, whole: Conversation, index: int) -> EncodedText:
        """Return the conversation up to an answer, of which only that answer is trained.

        Tokens that the generation prompt gives, such as the header, are not generated and never trained.
        """
        asked, message = whole.messages[:index], whole.messages[index]
        opened = self._render(asked, whole, opened=True)
        after = self._render([*asked, message], whole, opened=False)
        before = opened if after.startswith(opened) else self._render(asked, whole, opened=False)
        if not after.startswith(before) or after == before:
            raise _hidden(f"{whole.place}, message {index + 1}", "the messages before it")
        prompt = self._ids(opened, whole.place, add_special_tokens=False)
        generated = self._with_thinking(asked, message, whole, opened, after)
        if generated is not None:
            ids, start = [*prompt, *self.response(prompt, generated, whole.place)], len(prompt)
        else:
            ids = self._ids(after, whole.place, add_special_tokens=False)
            start = next((i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt))
        return EncodedText(ids, [self._until_eos(ids, start, len(ids))])

    def _with_thinking(
        self, asked: list[Message], message: Message, of: Conversation, opened: str, after: str
    ) -> str | None:
        """Return an answer as it is generated after `opened`, where the template leaves out the thinking before it.

        None where the template shows it, as `after`, or where the generation prompt ends the thinking.
        """
        content, thinking = message["content"], str(message.get("reasoning_content") or "").strip()
        if not isinstance(content, str) or (thinking or content.strip()) in after or CLOSED.search(opened):
            return None
        placeholder = {**message, "content": PLACEHOLDER}
        head, found, tail = self._render([*asked, placeholder], of, opened=False).partition(PLACEHOLDER)
        tag = OPENED.search(opened)
        if thinking:
            if not found or not tag:
                return None
            return f"{thinking}\n{tag[1].replace('<', '</')}\n\n{content}{tail}"
        shown = after.removeprefix(head).removesuffix(tail)
        if not found or after != head + shown + tail or not content.rstrip().endswith(shown.strip()):
            return None  # another change than a beginning that is left out
        if tag and content.lstrip().startswith(tag[1]):
            content = content.lstrip().removeprefix(tag[1]).removeprefix(tag[2])
        return content + tail

    def _until_eos(self, ids: list[int], start: int, end: int) -> Span:
        """Return the span up to EOS: templates add a line break after a turn, which the target does not generate."""
        eos, ends = self.tokenizer.eos_token_id, self.ends
        places = [place for place in range(start, end) if ids[place] == eos or ids[place] in ends]
        return [start, places[-1] + 1 if places else end]

    def _render(self, messages: list[Message], of: Conversation, *, opened: bool) -> str:
        if self.processor is not None:  # many of their templates read parts only
            messages = as_parts(messages, images_in(messages))
        return self._apply(messages, of, tokenize=False, add_generation_prompt=opened)

    def _apply(self, messages: list[Message], of: Conversation, **how: Any) -> Any:
        render = (self.tokenizer if self.processor is None else self.processor).apply_chat_template
        how = {**how, **self._at_time(), **self.options}
        try:
            try:
                return render(messages, tools=of.tools, **how)
            except TypeError:  # DeepSeek's templates add the arguments of tool calls to a text
                messages = [with_arguments(message, json.dumps) for message in messages]
                return render(messages, tools=of.tools, **how)
        except Exception as error:  # expressions of a template may raise anything
            why = reason_of(error)
            raise TemplateRefusal(
                f"{of.place}: the chat template refuses it ({why}); expected messages that it accepts",
                f"are refused by the chat template ({why})",
            ) from error

    def _at_time(self) -> dict[str, str]:
        """Return the argument with which the chat template shows `now`; transformers passes no functions to it."""
        template, now = (self.tokenizer if self.processor is None else self.processor).chat_template, self.now
        if now is None or not isinstance(template, str):
            return {}
        return {"chat_template": TIME.sub(lambda call: json.dumps(now.strftime(call[2])), template)}

    def _ids(self, text: str, place: str, **how: Any) -> list[int]:
        self._require_tokenisable(text, place)
        return self.tokenizer(text, verbose=False, **how)["input_ids"]

    def _require_plain(self, of: Conversation) -> None:
        if self.template != PLAIN:
            raise ConfigError(
                f"{of.place}: messages, and the target has no chat template; expected --chat-template "
                f"(data.chat_template in a recipe): a file, or one of {', '.join(TEMPLATES)}, of which {PLAIN} joins "
                "their texts by line breaks"
            )

    def _require_tokenisable(self, text: str, place: str) -> None:
        if len(text) > self.longest:
            raise TooLongText(f"{place}: {len(text)} characters; expected at most {self.longest}")
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{place}: unpaired surrogate {text[error.start]!r}; expected Unicode") from error


def _require_text(messages: list[Message], of: Conversation) -> None:
    if images_in(messages):
        raise ConfigError(f"{of.place}: an image; expected text: a recipe reads images with data.images")


def _hidden(place: str, before: str) -> TemplateRefusal:
    return TemplateRefusal(
        f"{place}: the chat template does not show the answer after {before}; expected a template with generation "
        "blocks (data.chat_template)",
        f"have an answer that the chat template does not show after {before}",
    )


def _unanswered(place: str) -> ConfigError:
    return ConfigError(
        f"{place}: no answer; data.response='text' expected a 'text', an assistant message, or 'response', "
        "'completion', 'answer' or 'output'; with data.response='target' the target answers"
    )


def _checked(whole: Conversation, vocab_size: int, known: int) -> EncodedText:
    """Return the tokens and spans of a file, the latter without ids from `known` on; ConfigError for invalid ones."""
    ids, spans = whole.input_ids or [], whole.spans or []
    good = _whole_numbers(ids) and isinstance(spans, list) and len(spans) > 0 and all(map(_whole_numbers, spans))
    if not good or any(len(span) != 2 or not 0 < span[0] < span[1] <= len(ids) for span in spans):
        raise ConfigError(f"{whole.place}: spans={spans}; expected [start, end] inside its 'input_ids'")
    if not all(0 <= token < vocab_size for token in ids):
        raise ConfigError(f"{whole.place}: input_ids={ids}; expected token ids below {vocab_size}")
    trained = without_unknown(ids, spans, known)
    return EncodedText(ids, trained, masked=sum(b - a for a, b in spans) - sum(b - a for a, b in trained))


def without_unknown(ids: list[int], spans: list[Span], known: int) -> list[Span]:
    """Return the spans without ids from `known` on."""
    trained = [False] * len(ids)
    for start, end in spans:
        trained[start:end] = [token < known for token in ids[start:end]]
    return mask_spans(trained)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def template_text(name: str) -> str:
    """Return a chat template from a file or from `names.TEMPLATES`, empty for none; ConfigError if it is not read."""
    if name == PLAIN:
        return ""
    if name in TEMPLATES:
        return files("draftsmith.distill").joinpath("templates", f"{name}.jinja").read_text(encoding="utf-8")
    try:
        return read_text(Path(name).expanduser(), LARGEST_TEMPLATE)
    except (OSError, ValueError) as error:
        known = ", ".join(TEMPLATES)
        raise ConfigError(
            f"chat_template={name} cannot be read ({error}); expected a file, or one of {known}"
        ) from error
