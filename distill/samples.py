"""The samples of a conversation: token ids, and the spans of the answers, on which a drafter is trained.

A sample's prompt is what an engine sends for the messages before an answer. The answer is what the target writes after
it: the difference that the answer makes to the rendered conversation, up to the token that ends the turn.
"""

import re
from dataclasses import replace

from draftsmith.distill.chat_template import PLACEHOLDER, Chat, TemplateRefusal, require_text
from draftsmith.distill.conversation import Conversation, LeftOut, Unanswered
from draftsmith.distill.encoded_text import EVERYTHING, EncodedText, Span
from draftsmith.distill.messages import ASSISTANT, Message, images_in
from draftsmith.distill.shown import THOUGHT, occurs, without_thinking
from draftsmith.errors import ConfigError

OPENED, CLOSED = (re.compile(rf"({begin}[a-z_]*(?:think|thought|reason)[a-z_]*>)(\s*)$") for begin in ("<", "</"))
"""The end of a generation prompt that begins the thinking, and of one that ends it, as for answers without any."""


class ImageAfterAnswer(LeftOut):
    """A conversation that cannot be trained on, because an image follows an answer."""

    def __init__(self, place: str) -> None:
        message = f"{place}: an image after an answer; expected images before the first one"
        super().__init__(message, "have an image after an answer")


def samples_of(chat: Chat, whole: Conversation, prompt_tokens: int) -> list[EncodedText]:
    """Return the tokens of a conversation with its answers; several samples if later turns change earlier ones.

    The first `prompt_tokens` tokens of a plain text, at most half of it, are only read; the rest is trained on.

    Raises:
        ConfigError: for a conversation without an answer, a template that does not show where answers are, or
            images, see `after_images`.
    """
    require_text(whole.messages, whole)
    stored = chat.stored(whole)
    if stored is not None:
        return [stored] if stored.spans else []
    if not whole.messages:
        return [_text_sample(chat, whole, prompt_tokens)]
    if not whole.answers:
        raise Unanswered(whole.place)
    if not chat.tokenizer.chat_template:
        return [_first_answer(chat, whole)] if whole.answers[0] in whole.trained else []
    return _turn_by_turn(chat, whole)


def after_images(chat: Chat, whole: Conversation, prompt: list[int]) -> list[EncodedText]:
    """Return the samples of a conversation with images before its first answer.

    The template shows each image as one placeholder; the processor's tokens of the prompt take its place.

    Args:
        prompt: the tokens of `prompt_inputs` for the messages before the first answer.
    """
    if images_in(whole.messages[len(whole.asked) :]):
        raise ImageAfterAnswer(whole.place)
    shown = chat.opened(whole.asked, whole)[1]
    if not whole.answers:
        raise Unanswered(whole.place)
    samples, more = [], len(prompt) - len(shown)
    for sample in _turn_by_turn(chat, whole):
        if sample.input_ids[: len(shown)] != shown:
            raise not_found(whole.place, "the prompt with images")
        spans = [[start + more, end + more] for start, end in sample.spans]
        ids = prompt + sample.input_ids[len(shown) :]
        samples.append(replace(sample, input_ids=ids, spans=spans))
    return samples


def marked_spans(chat: Chat, whole: Conversation, ids: list[int], count: int) -> list[Span]:
    """Return the spans of those of the first `count` messages that the data marks as not trained, in a sample.

    Everything where the template does not show these messages one after the other.
    """
    spans: list[Span] = []
    for place in sorted(place for place in whole.marked if place < count):
        try:
            before, after = _shown_tokens(chat, whole, place), _shown_tokens(chat, whole, place + 1)
        except ConfigError:
            return [EVERYTHING]
        if len(before) >= len(ids) and before[: len(ids)] == ids:
            break  # the sample ends before
        if ids[: len(after)] != after or after[: len(before)] != before:
            return [EVERYTHING]
        spans.append([len(before), len(after)])
    return spans


def _shown_tokens(chat: Chat, whole: Conversation, count: int) -> list[int]:
    """Return the tokens of the first messages."""
    shown = chat.render(whole.messages[:count], whole, opened=False) if count else ""
    return chat.ids(shown, whole.place, add_special_tokens=False)


def _text_sample(chat: Chat, whole: Conversation, prompt_tokens: int) -> EncodedText:
    if not whole.whole:
        if whole.answer is None:
            raise Unanswered(whole.place)
        return _answered(chat, chat.plain(whole.text, whole.place), whole.answer, whole.place)
    ids = chat.plain(whole.text, whole.place)
    cut = min(prompt_tokens, len(ids) // 2)
    return EncodedText(ids, [[cut, len(ids)]])


def _first_answer(chat: Chat, whole: Conversation) -> EncodedText:
    """Return the first answer only: a target without a template is not trained on conversations."""
    message = whole.messages[whole.answers[0]]
    prompt, answer = chat.generation_prompt(whole.asked, whole), str(message["content"])
    chat.require_shown(answer, [message], whole)
    return _answered(chat, prompt, answer, whole.place)


def _answered(chat: Chat, prompt: list[int], answer: str, place: str) -> EncodedText:
    """Return a text and its answer, which EOS ends."""
    ids, ended = _until_end(chat, chat.response(prompt, answer, place), place)
    eos = chat.tokenizer.eos_token_id
    ids = [*prompt, *ids, *([] if ended or eos is None else [eos])]
    return EncodedText(ids, [[len(prompt), len(ids)]])


def _until_end(chat: Chat, ids: list[int], place: str) -> tuple[list[int], bool]:
    """Return an answer up to the first token that ends it, and whether there is one.

    Raises:
        LeftOut: for an answer of nothing else.
    """
    eos = chat.tokenizer.eos_token_id
    length = next((count for count, token in enumerate(ids) if token in chat.ends or token == eos), len(ids))
    if not str(chat.tokenizer.decode(ids[:length], skip_special_tokens=True)).strip():
        raise LeftOut(f"{place}: an empty answer; expected a text", "have an empty answer")
    return ids[: length + 1], length < len(ids)


def _turn_by_turn(chat: Chat, whole: Conversation) -> list[EncodedText]:
    """Return a sample of each answer, with those before it where its prompt shows them token by token.

    Some templates render an earlier turn differently once a later one follows (without its thinking): the earlier
    turn is then a sample of its own.
    """
    samples: list[EncodedText] = []
    chat.require_context(whole, len(whole.messages))
    for index in whole.trained:
        sample = answer_sample(chat, whole, index)
        last = samples[-1] if samples else None
        if last is not None and sample.input_ids[: min(len(last.input_ids), sample.spans[0][0])] == last.input_ids:
            unended = last.unended + sample.unended
            samples[-1] = EncodedText(sample.input_ids, [*last.spans, *sample.spans], unended=unended)
        else:
            samples.append(sample)
    return samples


def answer_sample(chat: Chat, whole: Conversation, index: int) -> EncodedText:
    """Return the prompt of the answer at this place and the answer, which is trained."""
    asked, message = whole.messages[:index], whole.messages[index]
    text, prompt = chat.opened(asked, whole)
    written = _written(chat, whole, index, text)
    begun = OPENED.search(text)
    chat.require_shown((begun[0] if begun else "") + written, [message], whole)
    ids = chat.ids(text + written, whole.place, add_special_tokens=False)
    # An engine sends the prompt's tokens, also where the answer's first characters would change the last one.
    same = ids[: len(prompt)] == prompt
    ids, ended = _until_end(
        chat, ids[len(prompt) :] if same else chat.response(prompt, written, whole.place), whole.place
    )
    end = [] if ended else _end_of_next_role(chat, whole, index)
    ids = [*prompt, *ids, *end]
    return EncodedText(ids, [[len(prompt), len(ids)]], unended=int(not ended and not end))


def _end_of_next_role(chat: Chat, whole: Conversation, index: int) -> list[int]:
    """Return the tokens up to one that ends an answer and begins the next message, as in GLM's templates."""
    *messages, message = map(without_thinking, whole.messages[: index + 1])
    role = "tool" if message.get("tool_calls") else "user"
    following = [*whole.messages[index + 1 : index + 2], {"role": role, "content": PLACEHOLDER}][:1]
    messages = [*messages, {**message, "content": PLACEHOLDER}]
    try:
        text, longer = (chat.render(it, whole, opened=False) for it in (messages, [*messages, *following]))
    except TemplateRefusal:
        return []
    ids = chat.ids(longer[len(text) :], whole.place, add_special_tokens=False) if longer.startswith(text) else []
    place = next((place for place, token in enumerate(ids) if token in chat.ends), None)
    blank = place is not None and not str(chat.tokenizer.decode(ids[:place])).strip()
    return ids[: place + 1] if place is not None and blank else []


def _written(chat: Chat, of: Conversation, index: int, text: str) -> str:
    """Return what the target writes after a prompt.

    Raises:
        TemplateRefusal: where the rendered answer does not follow the prompt.
    """
    asked, message = of.messages[:index], of.messages[index]
    after = chat.render([*asked, message], of, opened=False)
    begun, content = OPENED.search(text), message["content"]
    hidden = isinstance(content, str) and THOUGHT.match(content) and not occurs(content, after)
    if hidden and not CLOSED.search(text):  # the target writes it all the same
        return _with_thinking(chat, of, index, begun, after)
    if after.startswith(text) and after != text:
        return after[len(text) :]
    if begun is not None and after.startswith(text.rstrip()):
        return after[len(text.rstrip()) :].lstrip()
    if begun is not None:
        return _with_thinking(chat, of, index, begun, after)
    return _after_header(chat, of, index, text, after)


def _after_header(chat: Chat, of: Conversation, index: int, text: str, after: str) -> str:
    """Return an answer whose rendering does not begin with the prompt, but has the header of answers."""
    asked, place = of.messages[:index], f"{of.place}, message {index + 1}"
    other = chat.render([*asked, {"role": ASSISTANT, "content": PLACEHOLDER}], of, opened=False)
    ends = (place for place, (one, two) in enumerate(zip(after, other, strict=False)) if one != two)
    common = after[: next(ends, len(other))]
    # The prompt may end with more than the header, such as thinking that is empty.
    if text.startswith(common) and other.startswith(PLACEHOLDER, len(common)) and after != common:
        return after[len(common) :]
    # Or earlier messages are shown in another way once they are answered.
    before = chat.render(asked, of, opened=False)
    header = text.removeprefix(before) if text.startswith(before) else ""
    if header and header in common:
        return after[common.rindex(header) + len(header) :]
    if CLOSED.search(text) and (of.messages[index].get("reasoning_content") or THOUGHT.match(after[len(common) :])):
        raise TemplateRefusal(
            f"{place}: an answer with thinking, and the generation prompt ends thinking; expected answers without, "
            "or template options with thinking (data.template_options)",
            "have an answer with thinking, which the generation prompt ends",
        )
    raise not_found(place, "the messages before it")


def _around(chat: Chat, asked: list[Message], message: Message, of: Conversation) -> tuple[str | None, str]:
    """Return what the template shows before and after the content of a message; None for none."""
    shown = chat.render([*asked, {**message, "content": PLACEHOLDER}], of, opened=False)
    before, found, after = shown.partition(PLACEHOLDER)
    return before if found else None, after


def _with_thinking(chat: Chat, of: Conversation, index: int, begun: re.Match[str] | None, after: str) -> str:
    """Return an answer with its thinking, where the template leaves it out of answers.

    Args:
        begun: the end of the prompt, if it begins the thinking.
    """
    asked, message, place = of.messages[:index], of.messages[index], f"{of.place}, message {index + 1}"
    content, thinking = message["content"], str(message.get("reasoning_content") or "").strip()
    header, tail = _around(chat, asked, message, of)
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
        raise not_found(place, "the messages before it")  # another change than a beginning that is left out
    if tag and content.lstrip().startswith(tag):
        content = content.lstrip().removeprefix(tag).removeprefix(space)
    return content + tail


def not_found(place: str, before: str) -> TemplateRefusal:
    return TemplateRefusal(
        f"{place}: the chat template does not show the answer after {before}; expected another template "
        "(data.chat_template)",
        f"have an answer that the chat template does not show after {before}",
    )
