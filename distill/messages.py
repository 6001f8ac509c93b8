"""Messages in the layouts of published data sets, in the one form that chat templates read."""

import base64
import binascii
import io
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import ConfigError, one_line, reason_of
from draftsmith.reading import parse_json

if TYPE_CHECKING:
    from PIL import Image

Message = dict[str, Any]
"""`role`, `content`, and other keys that the chat template reads, such as `tool_calls` or `reasoning_content`."""

ASSISTANT, SYSTEM = "assistant", "system"
ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "chatbot": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "assistant": ASSISTANT,
    "model": ASSISTANT,
    "system": SYSTEM,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "ipython": "tool",
    "developer": "developer",
    "environment": "environment",
    "document": "document",
}
"""Role names of ShareGPT and others, in lower case, and the names in chat templates. The last three are roles that some
published templates know (gpt-oss, OLMo 3, Granite)."""
FLAGS = {"weight": 0, "train": 0, "loss": 0, "masked": 1}
"""Keys with which data sets mark messages (OpenAI and Mistral, Axolotl, ms-swift, others), each with the value of a
message that is not trained."""
CONTEXT = "context"
"""Key of a message that is not trained, until its conversation is built."""
CONTENTS = ("content", "value", "tool_calls", "function_call")
TEXT_TYPES = ("text", "input_text", "output_text")
THINKING = "thinking"
AS_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|from|content|value)'\s*:")
"""The begin of a list of messages as Python and pandas write it into a text column."""


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages, whatever their roles, rather than of other things."""
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    keys = value.keys() if isinstance(value, dict) else set[str]()
    return bool({"role", "from"} & keys and keys & set(CONTENTS))


def unpacked(place: str, key: str, value: Any) -> Any:
    """Return a list of messages, or of `turns`, from a column that holds it in another form; other values as they are.

    The other forms are JSON text, one message, and an object with the list of the messages' values for each key.

    Raises:
        ConfigError: for such a list as Python writes it, which is not JSON, and for lists of different lengths.
    """
    if isinstance(value, dict) and {"role", "from"} & value.keys():
        return _rows(place, key, value)
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        read = parse_json(value)
    except ValueError as error:
        if AS_PYTHON.match(value):
            raise ConfigError(f"{place}: '{key}' is a list of messages as Python text; expected JSON") from error
        return value
    return read if is_messages(read) or (key == "turns" and isinstance(read, list)) else value


def _rows(place: str, key: str, value: dict[str, Any]) -> Any:
    """Return the messages of an object of lists, or the list of one message."""
    columns = {name: column for name, column in value.items() if column is not None}
    if not all(isinstance(column, list) for column in columns.values()):
        return [value] if _is_message(value) else value
    if len(set(map(len, columns.values()))) > 1:
        lengths = ", ".join(f"{len(column)} of {name!r}" for name, column in columns.items())
        raise ConfigError(f"{place}: {key!r} has lists of {lengths}; expected one of each for every message")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def read_messages(place: str, entries: list[Any], images: Path | None) -> list[Message]:
    """Return messages with the roles that templates know, text as a string, and arguments of tool calls as objects.

    Args:
        place: file and line, for errors.
        images: see `image_part`.

    Raises:
        ConfigError: naming a role or a part of a message that is not known.
    """
    return [_message(place, number, entry, images) for number, entry in enumerate(entries, 1)]


def _message(place: str, number: int, entry: Any, images: Path | None) -> Message:
    here = f"{place}: message {number}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{here} is {type(entry).__name__}; expected role and content")
    # Lines that were written from a table have every field in every message.
    given = {key: value for key, value in entry.items() if value is not None}
    name = given.get("from", given.get("role"))
    if name is None or entry.keys().isdisjoint(CONTENTS):
        raise ConfigError(f"{here} has keys {sorted(given)}; expected role and content")
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise ConfigError(f"{here} is from {name!r}; expected one of {', '.join(ROLES)}")
    content, thinking = _content(here, place, given.get("value", given.get("content", "")), images)
    message = {key: value for key, value in given.items() if key not in ("from", "value", *FLAGS, *CONTENTS)}
    message |= {"role": role, "content": content}
    # the names of most templates, of vLLM and of gpt-oss
    thinking = given.get("reasoning_content") or thinking or given.get("reasoning") or given.get(THINKING)
    if isinstance(thinking, str) and thinking:
        message["reasoning_content"] = thinking
    calls = _calls(here, given)
    if calls:  # many templates test for the key
        message["tool_calls"] = calls
    if role == ASSISTANT:
        _check_flags(here, given)
    if any(key in given and given[key] == value for key, value in FLAGS.items()):
        message[CONTEXT] = True
    return with_arguments(message, parse_json)


def _calls(here: str, message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of a message, each of which, or all, may be JSON text."""
    calls = _parsed(message.get("tool_calls")) or []
    if not calls and (function := _parsed(message.get("function_call"))):
        calls = [{"type": "function", "function": function}]
    calls = [_parsed(call) for call in calls] if isinstance(calls, list) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        shown = one_line(repr(message.get("tool_calls")), 80)
        raise ConfigError(f"{here}: tool_calls={shown}; expected a list of objects, or its JSON text")
    return calls


def _parsed(value: Any) -> Any:
    """Return what JSON text says; another value as it is."""
    try:
        return parse_json(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        return value


def _check_flags(here: str, message: Message) -> None:
    """Raise ConfigError for an answer of which only a part is trained, or that is weighted."""
    for key in FLAGS.keys() & message.keys():
        if message[key] not in (0, 1):
            raise ConfigError(f"{here}: {key}={message[key]!r}; expected 0 or 1, or true or false")
    if "train_detail" in message:
        raise ConfigError(f"{here}: 'train_detail' marks parts of a message; expected 'train' for all of it")


def _content(here: str, place: str, content: Any, images: Path | None) -> tuple[Any, str]:
    """Return the text of a message, or its parts where it has images, and its thinking."""
    if isinstance(content, str):
        return content, ""
    parts: list[dict[str, Any]] = []
    thinking: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        part = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise ConfigError(f"{here}: content of {type(part).__name__}; expected text or parts with a type")
        kind = part.get("type", "text" if "text" in part else None)
        text = part.get(THINKING if kind == THINKING else "text")
        if kind in IMAGE_TYPES:
            parts.append(image_part(place, part, images))
        elif kind not in (*TEXT_TYPES, THINKING) or not isinstance(text, str | None):
            expected = ", ".join((*TEXT_TYPES, THINKING, *IMAGE_TYPES))
            raise ConfigError(f"{here}: a part of type {kind!r} with keys {sorted(part)}; expected one of {expected}")
        elif kind == THINKING:
            thinking.append(text or "")
        else:
            parts.append({"type": "text", "text": text or ""})
    if any(part["type"] == "image" for part in parts):
        return parts, "".join(thinking)
    return "".join(part["text"] for part in parts), "".join(thinking)  # templates of text models read no parts


def text_of(place: str, key: str, value: Any) -> str:
    """Return the text of a column that holds it as a message, a part of one, or a list of parts.

    Raises:
        ConfigError: naming the column, for anything else.
    """
    here = f"{place}: {key!r}"
    value = value[0] if is_messages(value) and len(value) == 1 else value
    if isinstance(value, dict) and "type" not in value:
        value = value.get("content", value.get("value", value))
    text, _ = _content(here, place, value, None)
    if not isinstance(text, str):
        raise ConfigError(f"{here} has an image; expected text")
    return text


def read_tools(place: str, tools: Any) -> list[Any] | None:
    """Return the tools of a conversation, which may be JSON text, or each of them; None where there are none."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ConfigError(f"{place}: 'tools' is not JSON ({error}); expected a list of tools") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ConfigError(f"{place}: 'tools' is {type(tools).__name__}; expected a list of tools")
    return [_parsed(tool) for tool in tools]


def with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message with the arguments of its tool calls in another form, JSON text or objects.

    Args:
        convert: to text, such as json.dumps, or parse_json. What it refuses stays as it is.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, convert) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str) != (convert is parse_json):
        return call
    try:
        return {**call, "function": {**function, "arguments": convert(function.get("arguments"))}}
    except (TypeError, ValueError):
        return call


IMAGE_KEYS = ("image", "path", "url")
"""Keys of a part that name its image."""
IMAGE_TYPES = ("image", "image_url")
"""Types of parts that are images."""
DATA_URI = "data:image/"
LARGEST_IMAGE = 2**26
"""Bytes of a file or a data URI."""


def image_part(place: str, part: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return a part that names an image, by a file or a data URI, as {"type": "image", "image": path or data URI}.

    Args:
        place: file and line of the row.
        folder: of the images; default: the folder of the file. Paths are relative to it and do not leave it.

    Raises:
        ConfigError: for an image without a file, outside the folder or on the network.
    """
    names = [part[key] for key in (*IMAGE_KEYS, "image_url") if part.get(key) is not None]
    name = names[0].get("url") if len(names) == 1 and isinstance(names[0], dict) else names[0] if names else None
    if len(names) != 1 or not isinstance(name, str):
        raise ConfigError(
            f"{place}: an image with keys {sorted(part)}; expected one of {', '.join(IMAGE_KEYS)}, with a text"
        )
    if not name.startswith(DATA_URI):
        name = str(_file(place, name, folder))
    return {"type": "image", "image": name}


def _file(place: str, name: str, folder: Path | None) -> Path:
    """Return the path of an image that a row names."""
    shown = name if len(name) <= 80 else name[:77] + "..."
    if "://" in name or name.startswith("data:"):
        raise ConfigError(f"{place}: image={shown!r}; expected a file, or a data URI that begins with {DATA_URI}")
    prompts = Path(place.rpartition(":")[0])
    if folder is None and not prompts.is_file():
        raise ConfigError(f"{place}: image={shown!r} of a data set without a folder; expected data URIs, or --images")
    root = (prompts.parent if folder is None else folder).resolve()
    try:
        path = (root / name).resolve()
        inside, exists = path.is_relative_to(root), path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero byte
        raise ConfigError(f"{place}: image={shown!r}; expected a file ({reason_of(error)})") from error
    if not inside:
        raise ConfigError(f"{place}: image={shown!r} lies outside {root}; expected a path inside it (--images FOLDER)")
    if not exists:
        raise ConfigError(f"{place}: image={shown!r} is no file in {root}; expected one")
    return path


def images_in(messages: list[dict[str, Any]]) -> list[str]:
    """Return the paths and data URIs of all images of these messages, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if isinstance(part, dict) and part.get("type") == "image"]


def opened(place: str, source: str) -> "Image.Image":
    """Return the image of a path or data URI in RGB; ConfigError where it cannot be read."""
    from PIL import Image

    shown = f"a data URI of {len(source)} characters" if source.startswith(DATA_URI) else source
    try:
        data = _bytes(source)
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # decoders raise errors without a common base class
        raise ConfigError(f"{place}: image={shown} cannot be read ({reason_of(error)}); expected an image") from error


def _bytes(source: str) -> bytes:
    if source.startswith(DATA_URI):
        head, _, text = source.partition(",")
        if not head.endswith(";base64"):
            raise ValueError("the data URI is not in base64")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(f"not base64: {error}") from error
    path = Path(source)
    if path.stat().st_size > LARGEST_IMAGE:
        raise ValueError(f"{path.stat().st_size:,} bytes; at most {LARGEST_IMAGE:,} are read")
    return path.read_bytes()


def as_parts(messages: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Return a copy of messages for a processor: every content is a list of parts, and images are those in `images`."""
    left = iter(images)

    def part(value: Any) -> Any:
        return (
            {"type": "image", "image": next(left)}
            if isinstance(value, dict) and value.get("type") == "image"
            else value
        )

    def content(value: Any) -> list[Any]:
        return (
            [part(each) for each in value] if isinstance(value, list) else [{"type": "text", "text": str(value or "")}]
        )

    return [{**message, "content": content(message.get("content"))} for message in messages]
