"""Read rows of prompts and conversations.

They come from JSON lines, JSON, Parquet, CSV, Arrow, plain text, a folder of such files, or a data set of the Hub.
"""

import bz2
import csv
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from datasets import Dataset, IterableDataset, disable_progress_bars, load_dataset, load_from_disk, logging

from draftsmith.distill.conversation import conversation
from draftsmith.errors import ConfigError, reason_of
from draftsmith.names import KNOWN, TABLES, prompts_look_local, require_cached_prompts
from draftsmith.reading import parse_json

Row = tuple[str, dict[str, Any]]
"""File and line of a row, for errors, and its fields."""

FIRST_ROWS = 20
"""Rows that say whether a source has answers."""
LONGEST_ROW = 2**28
"""Characters of a line; a small compressed file may expand to any size."""
ENCODING = "utf-8-sig"
"""UTF-8, with or without the byte order mark that tools of Windows write."""
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ARCHIVE = re.compile(r"\.(zst|zstd|lz4|zip|7z|tar|tgz|rar|gz|bz2|xz)$")
METADATA = {"config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}
"""Files in folders of data sets that hold no rows."""
SHARD = re.compile(r"(\w+)-\d{5}-of-\d{5}")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words in names of files and folders that mean a split, as on the Hub."""


def read_source(source: str, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    """Yield the rows of a file, of the files of a split in a folder in the order of their names, or of a Hub data set.

    Args:
        subset: configuration of a Hub data set; of a folder, a folder in it.
        split: of a Hub data set, or of a folder whose files or folders name splits; files that name none are of train.

    Raises:
        ConfigError: during iteration, naming the line, for data that is missing, empty or not an object.
    """
    path, empty = Path(source).expanduser(), True
    local = path.exists() or prompts_look_local(source)
    rows = _local(path, subset, split) if local else _hub(source, subset, split)
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ConfigError(f"{source} is empty; expected at least one row")


def source_stamp(source: str, subset: str | None = None, split: str = "train") -> list[Any]:
    """Return names, sizes and times of the files, or the name of the data set: a cache key for the rows."""
    path = Path(source).expanduser()
    if not path.exists():
        return [source, subset, split]
    files = [path] if path.is_file() else _visible(path)
    stamp: list[Any] = [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return stamp if path.is_file() else [*stamp, subset, split]


def _visible(folder: Path) -> list[Path]:
    """Return the files of a folder in the order of their names, without hidden ones such as Jupyter's checkpoints."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in files if not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)]


def _local(path: Path, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    if path.is_dir():
        yield from _folder(_of_subset(path, subset), split)
    elif not path.exists():
        raise ConfigError(f"prompts={path}; expected a file or a folder, and there is none")
    elif not path.is_file():  # reading a pipe may block
        raise ConfigError(f"prompts={path} is not a regular file; expected a file or a folder")
    elif subset is not None:
        raise ConfigError(f"prompts={path} is a file and has no subset {subset!r}; expected none")
    elif path.suffix in TABLES:
        yield from _numbered(path, _load(str(path), TABLES[path.suffix], data_files=str(path), split="train"))
    elif ARCHIVE.search(path.name) and not path.name.endswith(KNOWN):
        raise ConfigError(f"prompts={path} is compressed; expected it decompressed, or a text as .gz, .bz2 or .xz")
    else:
        yield from _text(path)


def _of_subset(path: Path, subset: str | None) -> Path:
    if subset is None or (path / subset).is_dir():
        return path / (subset or "")
    folders = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    raise ConfigError(f"prompts={path} has no folder of the subset {subset!r}; expected one of {folders} or none")


def _folder(path: Path, split: str) -> Iterator[Row]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        data = _loaded(path, lambda: load_from_disk(path))
        if not isinstance(data, Dataset):
            if split not in data:
                raise ConfigError(f"prompts={path} has no split {split!r}; expected one of {', '.join(data)}")
            data = data[split]
        yield from _numbered(path, data.with_format(None))
        return
    files = [
        file for file in _visible(path) if file.name not in METADATA and ARCHIVE.sub("", file.name).endswith(KNOWN)
    ]
    if not files:
        raise ConfigError(f"prompts={path} holds no file that ends in {', '.join(KNOWN)}; expected at least one")
    splits = {file: _splits_of(file.relative_to(path)) for file in files}
    chosen = [file for file in files if {split, SPLITS.get(split, split)} & set(splits[file])]
    if not chosen:
        known = ", ".join(sorted({names[0] for names in splits.values()}))
        raise ConfigError(f"prompts={path} has no file of the split {split!r}; expected one of {known}")
    for file in chosen:
        yield from _local(file)


def _splits_of(file: Path) -> list[str]:
    """Return the names of the split that a file of a folder belongs to, the usual one first.

    They are that of a shard (`train_sft-00000-of-00003.parquet`), or the split that a word in the names of its folders
    or its own means, and these names; train where no word does.
    """
    name = file.name.partition(".")[0]
    if shard := SHARD.match(name):
        return [shard[1]]
    names = [*file.parts[:-1], name]
    words = [word for part in names for word in re.split(r"[^a-z]+", part.lower())]
    return [next((SPLITS[word] for word in words if word in SPLITS), "train"), *names]


def _hub(name: str, subset: str | None, split: str) -> Iterator[Row]:
    require_cached_prompts(name, "prompts")
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
        kept = {"content", "value"} if {"role", "from"} & value.keys() else {}  # an answer's text may be null
        return {key: _without_nulls(each) for key, each in value.items() if each is not None or key in kept}
    if isinstance(value, list) and isinstance(next((each for each in value if each is not None), None), dict | list):
        return [_without_nulls(each) for each in value]
    return value


def _text(path: Path) -> Iterator[Row]:
    """Read text, JSON lines, an array of objects or CSV, without `datasets`, whose errors do not name the line."""
    opener = OPENERS.get(path.suffix, open)
    kind = (path.with_suffix("") if path.suffix in OPENERS else path).suffix
    try:
        with opener(path, "rt", encoding=ENCODING, newline="" if kind == ".csv" else None) as file:
            if kind == ".csv":
                yield from _cells(path, file)
                return
            if kind == ".json" and _begins_with(file, "["):
                file.seek(0)
                yield from _array(path, file.read())
                return
            file.seek(0)
            for place, line in _lines(path, file):
                yield place, {"text": line} if kind == ".txt" else _object(place, line)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _unreadable(path, error) from error


def _cells(path: Path, file: TextIO) -> Iterator[Row]:
    """Yield the rows of a CSV file under its header: cells are text as it is, and empty ones are left out."""
    csv.field_size_limit(LONGEST_ROW)
    reader = csv.DictReader(file, strict=True)
    try:
        for row in reader:
            place = f"{path}:{reader.line_num}"
            if None in row:
                raise ConfigError(f"{place}: more cells than the header has; expected {len(row) - 1}")
            yield place, {name: cell for name, cell in row.items() if cell}
    except csv.Error as error:
        raise ConfigError(
            f"{path}:{reader.reader.line_num}: not CSV ({error}); expected cells in quotes or without"
        ) from error


def _begins_with(file: TextIO, character: str) -> bool:
    """Return whether the first character of a file that is no white space is this one."""
    while (first := file.read(1)).isspace():
        pass
    return first == character


def _lines(name: str | Path, file: TextIO) -> Iterator[tuple[str, str]]:
    """Yield the file and number, and the text, of each line that is not blank, as they are read."""
    number = 0
    while line := file.readline(LONGEST_ROW):
        number += 1
        if len(line) == LONGEST_ROW:
            raise ConfigError(f"{name}:{number}: a line of {LONGEST_ROW} characters or more; expected shorter")
        if line.strip():
            yield f"{name}:{number}", line.rstrip("\n")


def _unreadable(name: str | Path, error: Exception) -> ConfigError:
    return ConfigError(f"{name} cannot be read as text ({reason_of(error)}); expected UTF-8")


def _array(path: Path, text: str) -> Iterator[Row]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected an array of objects") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict | str):
            raise ConfigError(f"{path}:{number}: {type(row).__name__}; expected a JSON object, or a string: a prompt")
        yield f"{path}:{number}", {"prompt": row} if isinstance(row, str) else row


def _object(place: str, line: str) -> dict[str, Any]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{place}: not JSON ({error}); expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: {type(row).__name__}; expected a JSON object")
    return row


def has_answers(source: str, subset: str | None = None, split: str = "train") -> bool:
    """Return whether most of the first rows of a source that can be read have a response."""
    answered: list[bool] = []
    for place, row in read_source(source, subset, split):
        with suppress(ConfigError):
            answered.append(conversation(place, row).answered)
        if len(answered) == FIRST_ROWS:
            break
    return 2 * sum(answered) > len(answered)
