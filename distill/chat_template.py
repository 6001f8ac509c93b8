"""Tokenise conversations with a chat template, and mark the assistant's tokens, on which a drafter is trained.

A sample's prompt is what an engine sends for the messages before an answer. The answer is what the target writes after
it: the difference that the answer makes to the rendered conversation, up to the token that ends the turn.
"""

import json
import re
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.distill.conversation import Conversation, LeftOut, Unanswered
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.encoded_text import EVERYTHING, EncodedText, Span, sampled_text
from draftsmith.distill.messages import ASSISTANT, Message, as_parts, images_in, opened, with_arguments
from draftsmith.distill.shown import THOUGHT, not_shown, occurs, template_variables, tools_shown, without_thinking
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.hidden_states import ProcessorInputs, inputs_fingerprint
from draftsmith.heads.model_config import known_tokens
from draftsmith.names import PLAIN, TEMPLATES
from draftsmith.provenance import encoding_fingerprint, tokenizer_fingerprint
from draftsmith.reading import read_text

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


class TooLongText(LeftOut):
    """A text with too many characters to be tokenised."""

    def __init__(self, place: str, size: int, longest: int) -> None:
        message = f"{place}: {size} characters; expected at most {longest}"
        super().__init__(message, f"have more than {longest:,} characters")


class TemplateRefusal(LeftOut):
    """A conversation that the chat template refuses, or of which it does not show everything."""

    faulty = True


class ImageAfterAnswer(LeftOut):
    """A conversation that cannot be trained on, because an image follows an answer."""

    def __init__(self, place: str) -> None:
        message = f"{place}: an image after an answer; expected images before the first one"
        super().__init__(message, "have an image after an answer")


def characters(tokens: int) -> int:
    """Return the length in characters up to which a text is tokenised where a limit of `tokens` tokens applies."""
    return min(LONGEST_TEXT, CHARACTERS * tokens)


@dataclass(frozen=True)
class Chat:
    """A tokenizer with its chat template.

    Args:
        template: replaces the tokenizer's template: a file, or one of `names.TEMPLATES`.
        options: arguments of the template besides the messages, such as `enable_thinking`.
        longest: most characters of a text; tokenising a longer one raises `TooLongText`.
        processor: the target's, for messages with images.
        ends: tokens that end the target's answers, besides the tokenizer's EOS.
        encodes: the target is an encoder-decoder, whose encoder reads the EOS that its tokenizer appends.
        now: the time for templates that show it; default: when they are rendered.
        vocab_size: ids that the target reads, of which the tokenizer may have fewer; default: the tokenizer's.
    """

    tokenizer: PreTrainedTokenizerBase
    template: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    longest: int = LONGEST_TEXT
    processor: Any = None
    ends: frozenset[int] = frozenset()
    encodes: bool = False
    now: datetime | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.template is not None:
            self.tokenizer.chat_template = template_text(self.template) or None
        if self.processor is not None:
            own = None if self.template is not None else self.processor.chat_template
            self.processor.chat_template = self.tokenizer.chat_template = own or self.tokenizer.chat_template
        self._require_read()

    def _require_read(self) -> None:
        """Raise ConfigError for an option that the chat template does not read."""
        read = template_variables(self.tokenizer.chat_template) if self.options else None
        for name in [] if read is None else sorted(self.options.keys() - read):
            known = ", ".join(sorted(read or ())) or "none: it has no variables"
            raise ConfigError(
                f"template option {name}={json.dumps(self.options[name], default=str)}: the chat template does not "
                f"read it; expected one of: {known}"
            )

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
            self._require_context(dialogue, len(dialogue.asked))
            return self.generation_prompt(dialogue.asked, dialogue)
        if not dialogue.text and dialogue.input_ids is not None:
            return next((it.input_ids[: it.spans[0][0]] for it in self.encode(dialogue, 0)), dialogue.input_ids)
        return self.plain(dialogue.text, dialogue.place)

    def require_turns(self, dialogue: Conversation) -> None:
        """Raise TemplateRefusal for later turns that the chat template refuses or does not show, after any answers."""
        messages: list[Message] = []
        for turn in dialogue.turns:
            messages += turn
            self.generation_prompt(messages, dialogue)
            messages.append({"role": ASSISTANT, "content": PLACEHOLDER})

    def plain(self, text: str, place: str = "text") -> list[int]:
        """Return the tokens of a text that goes through no template, with one BOS where the tokenizer adds it.

        An EOS that the tokenizer appends is for encoders only: no answer follows it.
        """
        ids, bos = self._ids(text, place), self.tokenizer.bos_token_id
        twice = bos is not None and ids[:2] == [bos, bos] and self.tokenizer("")["input_ids"][:1] == [bos]
        ids = ids[1:] if twice else ids  # the text began with BOS, as text that a template rendered does
        return ids[:-1] if self._appends_eos and not self.encodes else ids

    @cached_property
    def _appends_eos(self) -> bool:
        """Whether the tokenizer appends EOS to every text."""
        ids, bare = (self._ids("a", "", add_special_tokens=added) for added in (True, False))
        eos = self.tokenizer.eos_token_id
        return eos is not None and ids[-1:] == [eos] != bare[-1:]

    def generation_prompt(self, messages: list[Message], of: Conversation) -> list[int]:
        """Return the tokens of messages and of the start of an answer; with the template `PLAIN`, of their texts.

        Raises:
            ConfigError: for a tokenizer without a chat template, unless the user has named `PLAIN`.
            TemplateRefusal: for messages that the chat template refuses or does not show.
        """
        _require_text(messages, of)
        return self._opened(messages, of)[1]

    def _opened(self, messages: list[Message], of: Conversation) -> tuple[str, list[int]]:
        """Return the text and the tokens that an engine sends for messages, up to the start of an answer."""
        if self.tokenizer.chat_template:
            text = self._render(messages, of, opened=True)
            ids = self._ids(text, of.place, add_special_tokens=False)
        else:
            self._require_plain(of)
            text = "\n".join(str(message["content"]) for message in messages)
            ids = self.plain(text, of.place)
        self._require_shown(text, [message for message in messages if message["role"] != ASSISTANT], of, of.tools)
        return text, ids

    def _require_shown(
        self, text: str, messages: list[Message], of: Conversation, tools: list[Any] | None = None
    ) -> None:
        """Raise TemplateRefusal for messages or tools that do not occur in a rendered text."""
        lost = not_shown(messages, text, str(self.tokenizer.chat_template or ""))
        lost += [] if tools_shown(tools, text) else ["tools"]
        if lost:
            raise TemplateRefusal(
                f"{of.place}: the chat template does not show {', '.join(lost)}; expected a template that does "
                "(data.chat_template), or rows without",
                f"have {', '.join(lost)} that the chat template does not show",
            )

    def _require_context(self, whole: Conversation, count: int) -> None:
        """Raise TemplateRefusal for an answer that is not trained, among the first messages, and not shown.

        Its thinking may be left out, as an engine leaves it out of the prompt.
        """
        for place, message in enumerate(whole.messages[:count]):
            if message["role"] == ASSISTANT and place not in whole.trained and self.tokenizer.chat_template:
                text = self._render(whole.messages[: place + 1], whole, opened=False)
                self._require_shown(text, [without_thinking(message)], whole)

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
        self._opened(messages, of)  # raises for what is not shown
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
            raise ImageAfterAnswer(whole.place)
        shown = self._opened(whole.asked, whole)[1]
        if not whole.answers:
            raise Unanswered(whole.place)
        samples, more = [], len(prompt) - len(shown)
        for sample in self._turn_by_turn(whole):
            if sample.input_ids[: len(shown)] != shown:
                raise _hidden(whole.place, "the prompt with images")
            spans = [[start + more, end + more] for start, end in sample.spans]
            ids = prompt + sample.input_ids[len(shown) :]
            samples.append(replace(sample, input_ids=ids, spans=spans))
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
            sample = sampled_text(whole, self.vocab_size or self.known, self.known)
            return [sample] if sample.spans else []
        if not whole.messages:
            return [self._text(whole, prompt_tokens)]
        if not whole.answers:
            raise Unanswered(whole.place)
        if not self.tokenizer.chat_template:
            return [self._first_answer(whole)] if whole.answers[0] in whole.trained else []
        return self._turn_by_turn(whole)

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
            if whole.answer is None:
                raise Unanswered(whole.place)
            return self._answered(self.plain(whole.text, whole.place), whole.answer, whole.place)
        ids = self.plain(whole.text, whole.place)
        cut = min(prompt_tokens, len(ids) // 2)
        return EncodedText(ids, [[cut, len(ids)]])

    def _first_answer(self, whole: Conversation) -> EncodedText:
        """Return the first answer only: a target without a template is not trained on conversations."""
        message = whole.messages[whole.answers[0]]
        prompt, answer = self.generation_prompt(whole.asked, whole), str(message["content"])
        self._require_shown(answer, [message], whole)
        return self._answered(prompt, answer, whole.place)

    def response(self, prompt: list[int], answer: str, place: str) -> list[int]:
        """Return the tokens of a text that follows `prompt`, without EOS."""
        ids, unspaced = (
            self._ids(text, place, add_special_tokens=False) for text in (answer, answer.removeprefix(" "))
        )
        # Sentencepiece tokenizers add a space before the first word.
        return unspaced if ids != unspaced and text_after(self.tokenizer, prompt, unspaced) == answer else ids

    def _answered(self, prompt: list[int], answer: str, place: str) -> EncodedText:
        """Return a text and its answer, which EOS ends."""
        ids, ended = self._until_end(self.response(prompt, answer, place), place)
        eos = self.tokenizer.eos_token_id
        ids = [*prompt, *ids, *([] if ended or eos is None else [eos])]
        return EncodedText(ids, [[len(prompt), len(ids)]])

    def _until_end(self, ids: list[int], place: str) -> tuple[list[int], bool]:
        """Return an answer up to the first token that ends it, and whether there is one.

        Raises:
            LeftOut: for an answer of nothing else.
        """
        eos = self.tokenizer.eos_token_id
        length = next((count for count, token in enumerate(ids) if token in self.ends or token == eos), len(ids))
        if not str(self.tokenizer.decode(ids[:length], skip_special_tokens=True)).strip():
            raise LeftOut(f"{place}: an empty answer; expected a text", "have an empty answer")
        return ids[: length + 1], length < len(ids)

    def _turn_by_turn(self, whole: Conversation) -> list[EncodedText]:
        """Return a sample of each answer, with those before it where its prompt shows them token by token.

        Some templates render an earlier turn differently once a later one follows (without its thinking): the earlier
        turn is then a sample of its own.
        """
        samples: list[EncodedText] = []
        self._require_context(whole, len(whole.messages))
        for index in whole.trained:
            sample = self.sample(whole, index)
            last = samples[-1] if samples else None
            if last is not None and sample.input_ids[: min(len(last.input_ids), sample.spans[0][0])] == last.input_ids:
                unended = last.unended + sample.unended
                samples[-1] = EncodedText(sample.input_ids, [*last.spans, *sample.spans], unended=unended)
            else:
                samples.append(sample)
        return samples

    def sample(self, whole: Conversation, index: int) -> EncodedText:
        """Return the prompt of the answer at this place and the answer, which is trained."""
        asked, message = whole.messages[:index], whole.messages[index]
        text, prompt = self._opened(asked, whole)
        written = self._written(whole, index, text)
        begun = OPENED.search(text)
        self._require_shown((begun[0] if begun else "") + written, [message], whole)
        ids = self._ids(text + written, whole.place, add_special_tokens=False)
        # An engine sends the prompt's tokens, also where the answer's first characters would change the last one.
        same = ids[: len(prompt)] == prompt
        ids, ended = self._until_end(
            ids[len(prompt) :] if same else self.response(prompt, written, whole.place), whole.place
        )
        end = [] if ended else self._end_of_next_role(whole, index)
        ids = [*prompt, *ids, *end]
        return EncodedText(ids, [[len(prompt), len(ids)]], unended=int(not ended and not end))

    def _end_of_next_role(self, whole: Conversation, index: int) -> list[int]:
        """Return the tokens up to one that ends an answer and begins the next message, as in GLM's templates."""
        *messages, message = map(without_thinking, whole.messages[: index + 1])
        role = "tool" if message.get("tool_calls") else "user"
        following = [*whole.messages[index + 1 : index + 2], {"role": role, "content": PLACEHOLDER}][:1]
        messages = [*messages, {**message, "content": PLACEHOLDER}]
        try:
            text, longer = (self._render(it, whole, opened=False) for it in (messages, [*messages, *following]))
        except TemplateRefusal:
            return []
        ids = self._ids(longer[len(text) :], whole.place, add_special_tokens=False) if longer.startswith(text) else []
        place = next((place for place, token in enumerate(ids) if token in self.ends), None)
        blank = place is not None and not str(self.tokenizer.decode(ids[:place])).strip()
        return ids[: place + 1] if place is not None and blank else []

    def _written(self, of: Conversation, index: int, text: str) -> str:
        """Return what the target writes after a prompt.

        Raises:
            TemplateRefusal: where the rendered answer does not follow the prompt.
        """
        asked, message = of.messages[:index], of.messages[index]
        after = self._render([*asked, message], of, opened=False)
        begun, content = OPENED.search(text), message["content"]
        hidden = isinstance(content, str) and THOUGHT.match(content) and not occurs(content, after)
        if hidden and not CLOSED.search(text):  # the target writes it all the same
            return self._with_thinking(of, index, begun, after)
        if after.startswith(text) and after != text:
            return after[len(text) :]
        if begun is not None and after.startswith(text.rstrip()):
            return after[len(text.rstrip()) :].lstrip()
        if begun is not None:
            return self._with_thinking(of, index, begun, after)
        return self._after_header(of, index, text, after)

    def _after_header(self, of: Conversation, index: int, text: str, after: str) -> str:
        """Return an answer whose rendering does not begin with the prompt, but has the header of answers."""
        asked, place = of.messages[:index], f"{of.place}, message {index + 1}"
        other = self._render([*asked, {"role": ASSISTANT, "content": PLACEHOLDER}], of, opened=False)
        ends = (place for place, (one, two) in enumerate(zip(after, other, strict=False)) if one != two)
        common = after[: next(ends, len(other))]
        # The prompt may end with more than the header, such as thinking that is empty.
        if text.startswith(common) and other.startswith(PLACEHOLDER, len(common)) and after != common:
            return after[len(common) :]
        # Or earlier messages are shown in another way once they are answered.
        before = self._render(asked, of, opened=False)
        header = text.removeprefix(before) if text.startswith(before) else ""
        if header and header in common:
            return after[common.rindex(header) + len(header) :]
        if CLOSED.search(text) and (of.messages[index].get("reasoning_content") or THOUGHT.match(after[len(common) :])):
            raise TemplateRefusal(
                f"{place}: an answer with thinking, and the generation prompt ends thinking; expected answers without, "
                "or template options with thinking (data.template_options)",
                "have an answer with thinking, which the generation prompt ends",
            )
        raise _hidden(place, "the messages before it")

    def _around(self, asked: list[Message], message: Message, of: Conversation) -> tuple[str | None, str]:
        """Return what the template shows before and after the content of a message; None for none."""
        shown = self._render([*asked, {**message, "content": PLACEHOLDER}], of, opened=False)
        before, found, after = shown.partition(PLACEHOLDER)
        return before if found else None, after

    def _with_thinking(self, of: Conversation, index: int, begun: re.Match[str] | None, after: str) -> str:
        """Return an answer with its thinking, where the template leaves it out of answers.

        Args:
            begun: the end of the prompt, if it begins the thinking.
        """
        asked, message, place = of.messages[:index], of.messages[index], f"{of.place}, message {index + 1}"
        content, thinking = message["content"], str(message.get("reasoning_content") or "").strip()
        header, tail = self._around(asked, message, of)
        tag, space = ("", "") if begun is None else begun.groups()
        close = tag.replace("<", "</")
        if thinking and tag and header is not None and isinstance(content, str):
            return f"{thinking}{space}{close}{space * 2}{content}{tail}"
        if close not in str(content):
            raise TemplateRefusal(
                f"{place}: an answer without thinking, which the generation prompt begins with {tag}; expected "
                "'reasoning_content', or template options without thinking (data.template_options)",
                f"have an answer without the thinking that the generation prompt begins with {tag}",
            )
        shown = after.removeprefix(header or "").removesuffix(tail)
        if header is None or after != header + shown + tail or not content.rstrip().endswith(shown.strip()):
            raise _hidden(place, "the messages before it")  # another change than a beginning that is left out
        if tag and content.lstrip().startswith(tag):
            content = content.lstrip().removeprefix(tag).removeprefix(space)
        return content + tail

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
                as_text = partial(json.dumps, ensure_ascii=False)
                messages = [with_arguments(message, as_text) for message in messages]
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
            raise TooLongText(place, len(text), self.longest)
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
        f"{place}: the chat template does not show the answer after {before}; expected another template "
        "(data.chat_template)",
        f"have an answer that the chat template does not show after {before}",
    )


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
