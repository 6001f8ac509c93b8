"""Render and tokenise messages with a chat template, as an engine does for the prompt of an answer."""

import json
import re
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.distill.conversation import Conversation, LeftOut
from draftsmith.distill.detokenize import text_after
from draftsmith.distill.encoded_text import EncodedText, sampled_text
from draftsmith.distill.messages import ASSISTANT, Message, as_parts, images_in, opened, with_arguments
from draftsmith.distill.shown import not_shown, template_variables, tools_shown, without_thinking
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
            self.require_context(dialogue, len(dialogue.asked))
            return self.generation_prompt(dialogue.asked, dialogue)
        stored = None if dialogue.text else self.stored(dialogue)
        if stored is not None:
            return stored.input_ids[: stored.spans[0][0]] if stored.spans else stored.input_ids
        return self.plain(dialogue.text, dialogue.place)

    def stored(self, row: Conversation) -> EncodedText | None:
        """Return the tokens that a row of this tokenizer has; None for one of text, or of another tokenizer."""
        if row.input_ids is None or row.tokenizer not in (None, tokenizer_fingerprint(self.tokenizer)):
            return None
        if row.spans == [] and not row.text and not row.messages:
            return EncodedText(row.input_ids, [])
        return sampled_text(row, self.vocab_size or self.known, self.known)

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
        ids, bos = self.ids(text, place), self.tokenizer.bos_token_id
        twice = bos is not None and ids[:2] == [bos, bos] and self.tokenizer("")["input_ids"][:1] == [bos]
        ids = ids[1:] if twice else ids  # the text began with BOS, as text that a template rendered does
        return ids[:-1] if self._appends_eos and not self.encodes else ids

    @cached_property
    def _appends_eos(self) -> bool:
        """Whether the tokenizer appends EOS to every text."""
        ids, bare = (self.ids("a", "", add_special_tokens=added) for added in (True, False))
        eos = self.tokenizer.eos_token_id
        return eos is not None and ids[-1:] == [eos] != bare[-1:]

    def generation_prompt(self, messages: list[Message], of: Conversation) -> list[int]:
        """Return the tokens of messages and of the start of an answer; with the template `PLAIN`, of their texts.

        Raises:
            ConfigError: for a tokenizer without a chat template, unless the user has named `PLAIN`.
            TemplateRefusal: for messages that the chat template refuses or does not show.
        """
        require_text(messages, of)
        return self.opened(messages, of)[1]

    def opened(self, messages: list[Message], of: Conversation) -> tuple[str, list[int]]:
        """Return the text and the tokens that an engine sends for messages, up to the start of an answer."""
        if self.tokenizer.chat_template:
            text = self.render(messages, of, opened=True)
            ids = self.ids(text, of.place, add_special_tokens=False)
        else:
            self._require_plain(of)
            text = "\n".join(str(message["content"]) for message in messages)
            ids = self.plain(text, of.place)
        self.require_shown(text, [message for message in messages if message["role"] != ASSISTANT], of, of.tools)
        return text, ids

    def require_shown(
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

    def require_context(self, whole: Conversation, count: int) -> None:
        """Raise TemplateRefusal for an answer that is not trained, among the first messages, and not shown.

        Its thinking may be left out, as an engine leaves it out of the prompt.
        """
        for place, message in enumerate(whole.messages[:count]):
            if message["role"] == ASSISTANT and place not in whole.trained and self.tokenizer.chat_template:
                text = self.render(whole.messages[: place + 1], whole, opened=False)
                self.require_shown(text, [without_thinking(message)], whole)

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
        self.opened(messages, of)  # raises for what is not shown
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

    def answer(self, messages: list[Message], of: Conversation, prompt: list[int], tokens: list[int]) -> str:
        """Return the content of the message whose tokens were generated after `prompt`, which shows `messages`.

        The template adds its own text to the content when the message is rendered, so that text is removed here.
        """
        text = text_after(self.tokenizer, prompt, tokens)
        if not self.tokenizer.chat_template:
            return text
        before = self.render(messages, of, opened=True)
        whole = self.render([*messages, {"role": ASSISTANT, "content": PLACEHOLDER}], of, opened=False)
        return text.removeprefix(whole[len(before) :].partition(PLACEHOLDER)[0]) if whole.startswith(before) else text

    def response(self, prompt: list[int], answer: str, place: str) -> list[int]:
        """Return the tokens of a text that follows `prompt`, without EOS."""
        ids, unspaced = (self.ids(text, place, add_special_tokens=False) for text in (answer, answer.removeprefix(" ")))
        # Sentencepiece tokenizers add a space before the first word.
        return unspaced if ids != unspaced and text_after(self.tokenizer, prompt, unspaced) == answer else ids

    def render(self, messages: list[Message], of: Conversation, *, opened: bool) -> str:
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

    def ids(self, text: str, place: str, **how: Any) -> list[int]:
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


def require_text(messages: list[Message], of: Conversation) -> None:
    if images_in(messages):
        raise ConfigError(f"{of.place}: an image; expected text: a recipe reads images with data.images")


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
