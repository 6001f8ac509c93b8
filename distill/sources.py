"""Read conversations in the common formats (ShareGPT, messages, prompts, plain text) into one form.

Rows come from JSON lines, JSON, Parquet, CSV, Arrow, plain text, a folder of such files, or a data set of the Hub.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset, IterableDataset, disable_progress_bars, load_dataset, load_from_disk, logging

from draftsmith.distill.images import images_in, with_images
from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import parse_json

Message = dict[str, Any]
"""`role`, `content`, and other keys that the chat template reads, such as `tool_calls` or `reasoning_content`."""

ANSWERS = ("response", "completion", "answer", "output", "chosen")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Role names of ShareGPT and others, and the names in chat templates."""
ASSISTANT = "assistant"


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template, or plain text for the target to continue."""

    place: str
    """File and line, for errors."""
    messages: list[Message] = field(default_factory=list)
    text: str = ""
    """Plain text, if there are no messages."""
    whole: bool = False
    """The text includes its continuation."""
    answer: str | None = None
    """The response in another key of the row."""
    tools: list[Any] | None = None
    input_ids: list[int] | None = None
    """The sampled tokens, if the file holds them (`draftsmith data regenerate`)."""
    spans: list[list[int]] | None = None
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that `input_ids` belong to."""

    @property
    def turns(self) -> list[list[Message]]:
        """The messages between the answers; in a conversation without answers, each user message begins a turn."""
        unanswered = all(message["role"] != ASSISTANT for message in self.messages)
        turns: list[list[Message]] = [[]]
        for message in self.messages:
            if message["role"] == ASSISTANT:
                turns.append([])
                continue
            if unanswered and any(before["role"] == "user" for before in turns[-1]):
                turns.append([])
            turns[-1].append(message)
        return [turn for turn in turns if turn]

    @property
    def images(self) -> bool:
        """Some message has an image."""
        return bool(images_in(self.messages))

    @property
    def asked(self) -> list[Message]:
        """The messages before the first answer; empty if the conversation begins with an answer."""
        begins = bool(self.messages) and self.messages[0]["role"] != ASSISTANT
        return self.turns[0] if begins else []

    @property
    def opening(self) -> str:
        """The first messages as text: conversations with the same opening are held out together."""
        if self.text or self.messages:
            return self.text or json.dumps(self.asked, sort_keys=True, default=str)
        return json.dumps((self.input_ids or [])[: self.spans[0][0] if self.spans else None])


def conversation(place: str, row: dict[str, Any], images: Path | None = None) -> Conversation:
    """Parse a row with `messages`, `conversations` (ShareGPT), `turns`, `prompt`, `question`, `instruction` or `text`.

    A row with `input_ids` and `loss_mask`, as speculators prepares data, has tokens only.

    Args:
        images: folder of the images that messages name; default: the folder of the file.

    Raises:
        ConfigError: naming `place`, for a row that has none of these keys, or only empty ones, and for images that
            cannot be used, see `with_images`.
    """
    kept = {key: row[key] for key in ("input_ids", "spans", "tokenizer") if row.get(key) is not None}
    tools = _tools(place, row.get("tools"))
    messages = [_as_templates_read(place, message, images) for message in _messages(place, row)]
    if messages:
        answer = _answer(row)
        if answer is not None and messages[-1]["role"] != ASSISTANT:
            messages = [*messages, {"role": ASSISTANT, "content": answer}]
        return Conversation(place, messages, tools=tools, **kept)
    text = _text(row)
    if not text and {"input_ids", "loss_mask"} <= row.keys():
        ids, mask = row["input_ids"], row["loss_mask"]
        if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
            raise ConfigError(f"{place}: expected 'input_ids' and 'loss_mask' to be lists of one length")
        return Conversation(place, input_ids=ids, spans=mask_spans(mask))
    if not text:
        raise ConfigError(
            f"{place}: keys {sorted(row)}; expected a non-empty 'messages', 'conversations', 'turns', 'prompt', "
            "'question', 'instruction' or 'text'"
        )
    whole = isinstance(row.get("text"), str) and "prompt" not in row
    return Conversation(place, text=text, whole=whole, answer=None if whole else _answer(row), **kept)


def mask_spans(mask: Iterable[int]) -> list[list[int]]:
    """Return the ranges of nonzero entries; the first token has none before it to be predicted from."""
    spans: list[list[int]] = []
    for place, trained in enumerate(mask):
        if trained and place:
            if spans and spans[-1][1] == place:
                spans[-1][1] += 1
            else:
                spans.append([place, place + 1])
    return spans


def _text(row: dict[str, Any]) -> str:
    for key in ("prompt", "text", "question", "instruction"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            more = row.get("input") if key == "instruction" else None
            return f"{value}\n\n{more}" if isinstance(more, str) and more.strip() else value
    return ""


def _answer(row: dict[str, Any]) -> str | None:
    for key in ANSWERS:
        value = row.get(key)
        if isinstance(value, list) and value and isinstance(value[-1], dict):  # a list of messages
            value = _joined(value[-1].get("content"))
        if isinstance(value, str) and value:
            return value
    return None


def _messages(place: str, row: dict[str, Any]) -> list[Message]:
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        if not turns[0].strip():
            return []
        return [{"role": "user", "content": turn} for turn in turns]
    for key in ("messages", "conversations", "conversation", "prompt"):
        entries = row.get(key)
        if isinstance(entries, list) and entries:
            system = row.get("system")
            first = [{"role": "system", "content": system}] if isinstance(system, str) and system.strip() else []
            return first + [_message(place, number, entry) for number, entry in enumerate(entries, 1)]
    return []


def _message(place: str, number: int, entry: Any) -> Message:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: message {number} is {type(entry).__name__}; expected role and content")
    # Lines that were written from a table have every field in every message.
    entry = {key: value for key, value in entry.items() if value is not None}
    if "from" in entry and "value" in entry:
        role = ROLES.get(entry["from"]) if isinstance(entry["from"], str) else None
        if role is None:
            raise ConfigError(
                f"{place}: message {number} is from {entry['from']!r}; expected one of {', '.join(ROLES)}"
            )
        rest = {key: value for key, value in entry.items() if key not in ("from", "value")}
        return {**rest, "role": role, "content": entry["value"]}
    if not isinstance(entry.get("role"), str) or not ({"content", "tool_calls"} & entry.keys()):
        raise ConfigError(f"{place}: message {number} has keys {sorted(entry)}; expected role and content")
    return {"content": "", **entry}


def _as_templates_read(place: str, message: Message, images: Path | None) -> Message:
    """Return a message with its text as a string, images as `with_images` gives them, and arguments as objects."""
    content = with_images(place, _joined(message["content"]), images)
    return with_arguments({**message, "content": content}, parse_json)


def _joined(content: Any) -> Any:
    """Return parts that are all text as one string; templates of text models read no parts."""
    whole = isinstance(content, list) and all(map(_is_text, content))
    return "".join(part["text"] for part in content) if whole else content


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def with_arguments(message: Message, convert: Callable[[Any], Any]) -> Message:
    """Return a message with the arguments of its tool calls in another form, JSON text or objects.

    Args:
        convert: json.dumps or parse_json. What it refuses stays as it is.
    """
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call, convert) for call in calls]} if isinstance(calls, list) else message


def _call(call: Any, convert: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str) == (convert is json.dumps):
        return call
    try:
        return {**call, "function": {**function, "arguments": convert(function.get("arguments"))}}
    except (TypeError, ValueError):
        return call


def _tools(place: str, tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise ConfigError(f"{place}: 'tools' is not JSON ({error}); expected a list of tools") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ConfigError(f"{place}: 'tools' is {type(tools).__name__}; expected a list of tools")
    return tools


Row = tuple[str, dict[str, Any]]
"""File and line of a row, for errors, and its fields."""

TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
LINES = (".jsonl", ".ndjson", ".jsonl.gz")
LONGEST_ROW = 2**28
"""Characters of a line; a small compressed file may expand to any size."""
KNOWN = (*LINES, ".json", ".txt", *TABLES)


def read_source(source: str, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a file, of all files in a folder in the order of their names, or of a Hub data set.

    Args:
        subset: configuration of a Hub data set.
        split: of a Hub data set.

    Raises:
        ConfigError: during iteration, naming the line, for data that is missing, empty or not an object.
    """
    path, empty = Path(source).expanduser(), True
    rows = _local(path) if path.exists() or looks_local(source) else _hub(source, subset, split)
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ConfigError(f"{source} is empty; expected at least one row")


def looks_local(source: str) -> bool:
    """Return whether a name that does not exist is meant as a file."""
    return source.startswith((".", "/", "~")) or source.count("/") != 1 or source.endswith(KNOWN)


def source_stamp(source: str, subset: str | None = None, split: str = "train") -> list[Any]:
    """Return names, sizes and times of the files, or the name of the data set: a cache key for the rows."""
    path = Path(source).expanduser()
    if not path.exists():
        return [source, subset, split]
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _local(path: Path) -> Iterator[Row]:
    if path.is_dir():
        yield from _folder(path)
    elif not path.exists():
        raise ConfigError(f"prompts={path}; expected a file or a folder, and there is none")
    elif not path.is_file():  # reading a pipe may block
        raise ConfigError(f"prompts={path} is not a regular file; expected a file or a folder")
    elif path.suffix in TABLES:
        yield from _numbered(path, _load(str(path), TABLES[path.suffix], data_files=str(path), split="train"))
    elif path.suffix == ".txt":
        options = {"data_files": str(path), "split": "train", "sample_by": "paragraph"}
        yield from _numbered(path, _load(str(path), "text", **options))
    else:
        yield from _json(path)


def _folder(path: Path) -> Iterator[Row]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        data = _loaded(path, lambda: load_from_disk(path))
        if not isinstance(data, Dataset):
            raise ConfigError(f"prompts={path} holds splits {', '.join(data)}; expected the folder of one of them")
        yield from _numbered(path, data.with_format(None))
        return
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name.endswith(KNOWN)]
    if not files:
        raise ConfigError(f"prompts={path} holds no file that ends in {', '.join(KNOWN)}; expected at least one")
    for file in files:
        yield from _local(file)


def _hub(name: str, subset: str | None, split: str) -> Iterator[Row]:
    yield from _numbered(name, _load(name, name, subset, split=split))


def _load(source: str, *arguments: Any, **options: Any) -> Any:
    disable_progress_bars()
    return _loaded(source, lambda: load_dataset(*arguments, **options))


def _loaded(source: str | Path, load: Callable[[], Any]) -> Any:
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # the ConfigError below has the reason
    try:
        return load()
    except Exception as error:  # datasets raises errors without a common base
        expected = "expected a file, a folder or a data set of the Hub"
        raise ConfigError(f"prompts={source}; {expected} ({reason_of(error)})") from error
    finally:
        logging.set_verbosity(level)


def _numbered(name: str | Path, rows: Dataset | IterableDataset) -> Iterator[Row]:
    iterator, number = iter(rows), 0
    # Damaged columns raise when they are read.
    while (row := _loaded(name, lambda: _without_nulls(next(iterator, None)))) is not None:
        number += 1
        yield f"{name}:{number}", row


def _without_nulls(value: Any) -> Any:
    """Return a value of a table without keys that are null: all objects of a column have the keys of every one."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list) and isinstance(next((each for each in value if each is not None), None), dict | list):
        return [_without_nulls(each) for each in value]
    return value


def _json(path: Path) -> Iterator[Row]:
    """Read JSON lines or one array of objects, without `datasets`, whose errors do not name the line."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if path.suffix == ".json" and file.read(1) == "[":
                file.seek(0)
                yield from _array(path, file.read())
                return
            file.seek(0)
            yield from json_lines(path, file)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def json_lines(name: str | Path, file: TextIO) -> Iterator[Row]:
    """Yield the objects of JSON lines as they are read; ConfigError naming the line of one that is no object."""
    number = 0
    try:
        while line := file.readline(LONGEST_ROW):
            number += 1
            if len(line) == LONGEST_ROW:
                raise ConfigError(f"{name}:{number}: a line of {LONGEST_ROW} characters or more; expected shorter")
            if line.strip():
                yield f"{name}:{number}", _object(f"{name}:{number}", line)
    except UnicodeDecodeError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str | Path, error: Exception) -> ConfigError:
    return ConfigError(f"{name} cannot be read as text ({reason_of(error)}); expected JSON in UTF-8")


def _array(path: Path, text: str) -> Iterator[Row]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected an array of objects") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: {type(row).__name__}; expected a JSON object")
        yield f"{path}:{number}", row


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: {type(row).__name__}; expected a JSON object")
    return row
