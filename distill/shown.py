"""Compare messages with the text that a chat template makes of them: it may leave some out without a word."""

import html
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

import jinja2
from jinja2 import meta

from draftsmith.distill.messages import ASSISTANT, Message

GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags around answers, which transformers' extension of jinja reads."""
THOUGHT = re.compile(r".*</[a-z_]*(?:think|thought|reason)[a-z_]*>", re.DOTALL)
"""A text with thinking, up to its end."""
PROVIDED = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "tojson"}
PROVIDED |= {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"}
PROVIDED |= {"range", "dict", "lipsum", "cycler", "joiner", "namespace"}
"""Variables of chat templates that transformers and jinja provide."""


def not_shown(messages: list[Message], text: str, template: str) -> list[str]:
    """Return the kinds of content of these messages that do not occur in a text.

    White space, escapes of JSON and HTML, and words that the template itself names (such as /no_think, which some
    remove) make no difference.
    """
    shown, lost = _squashed(text), list[str]()
    for message in messages:
        role = message["role"]
        name = {ASSISTANT: "an answer", "tool": "a tool's result"}.get(role, f"a message of the role {role}")
        contents = {
            name: _texts(message.get("content")),
            "thinking": _texts(message.get("reasoning_content")),
            "a tool call": [text for call in message.get("tool_calls") or [] for text in _called(call)],
        }
        lost += [kind for kind, wanted in contents.items() if not all(_occurs(it, shown, template) for it in wanted)]
    return list(dict.fromkeys(lost))


def occurs(wanted: str, text: str) -> bool:
    """Return whether a text contains another, whatever their white space."""
    return _squashed(wanted) in _squashed(text)


def tools_shown(tools: list[Any] | None, text: str) -> bool:
    """Return whether the names of all tools occur in a text."""
    functions = [_function(tool) for tool in tools or []]
    names = [function["name"] for function in functions if isinstance(function.get("name"), str)]
    return all(name in text for name in names)


def without_thinking(message: Message) -> Message:
    """Return a message without thinking, which templates leave out of earlier answers."""
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": THOUGHT.sub("", content) if isinstance(content, str) else content}


def template_variables(template: Any) -> Collection[str] | None:
    """Return the variables that a chat template, or any of several by name, reads besides those that it is given.

    None for a template that cannot be parsed.
    """
    templates = template.values() if isinstance(template, dict) else [template or ""]
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        trees = [environment.parse(GENERATION.sub("", text)) for text in templates]
        return {name for tree in trees for name in meta.find_undeclared_variables(tree)} - PROVIDED
    except (jinja2.TemplateError, RecursionError):
        return None


def _texts(content: Any) -> list[str]:
    """Return the texts of a message, which may be a list of parts with images."""
    if isinstance(content, list):
        return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return [content] if isinstance(content, str) else []


def _function(value: Any) -> dict[str, Any]:
    """Return the function of a tool, or of a call of it."""
    inner = value.get("function", value) if isinstance(value, dict) else {}
    return inner if isinstance(inner, dict) else {}


def _called(call: Any) -> Iterator[str]:
    """Yield the name of a called function, and the keys and texts of its arguments; numbers have several spellings."""
    function = _function(call)
    yield from _strings([function.get("name"), function.get("arguments")])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from map(str, value)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, str):
        yield value


def _occurs(wanted: str, shown: str, template: str) -> bool:
    wanted = wanted.strip()
    if _squashed(wanted) in shown:
        return True
    unread = [word for word in wanted.split() if f"'{word}'" not in template and f'"{word}"' not in template]
    escaped = (json.dumps(wanted, ensure_ascii=False)[1:-1], json.dumps(wanted)[1:-1], html.escape(wanted))
    return any(_squashed(form) in shown for form in (*escaped, " ".join(unread)))


def _squashed(text: str) -> str:
    return "".join(text.split())
