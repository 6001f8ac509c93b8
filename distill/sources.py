"""Where rows come from: JSON lines, JSON, Parquet, plain text, a folder of them, or a data set of the Hub."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, disable_progress_bars, load_dataset, load_from_disk, logging

from draftsmith.errors import ConfigError, reason_of
from draftsmith.reading import parse_json

Row = tuple[str, dict[str, Any]]
"""Where a row stands, as errors name it, and its fields."""

TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
LINES = (".jsonl", ".ndjson", ".jsonl.gz")
LONGEST_ROW = 2**28
"""Characters of a line; a few bytes that are packed can unpack to any number."""
KNOWN = (*LINES, ".json", ".txt", *TABLES)


def read_source(source: str, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    """The rows of a file, of every file in a folder in order of their names, or of a Hub data set.

    Args:
        subset: configuration of a Hub data set.
        split: of a Hub data set.

    Raises:
        ConfigError: naming the line, for something that is missing, empty or no object; while it is read.
    """
    path, empty = Path(source).expanduser(), True
    rows = _local(path) if path.exists() or looks_local(source) else _hub(source, subset, split)
    for row in rows:
        empty = False
        yield row
    if empty:
        raise ConfigError(f"{source} is empty; expected at least one row")


def looks_local(source: str) -> bool:
    """Whether a name that does not exist was meant as a file."""
    return source.startswith((".", "/", "~")) or source.count("/") != 1 or source.endswith(KNOWN)


def source_stamp(source: str, subset: str | None = None, split: str = "train") -> list[Any]:
    """What changes when the rows may have: names, sizes and times of the files, or the name of the data set."""
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
    elif not path.is_file():  # reading a pipe would wait for whoever writes it
        raise ConfigError(f"prompts={path} is no regular file; expected a file or a folder")
    elif path.suffix in TABLES:
        yield from _numbered(path, _load(str(path), TABLES[path.suffix], data_files=str(path), split="train"))
    elif path.suffix == ".txt":
        options = {"data_files": str(path), "split": "train", "sample_by": "paragraph"}
        yield from _numbered(path, _load(str(path), "text", **options))
    else:
        yield from _json(path)


def _folder(path: Path) -> Iterator[Row]:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        found = _loaded(path, lambda: load_from_disk(path))
        if not isinstance(found, Dataset):
            raise ConfigError(f"prompts={path} holds splits {', '.join(found)}; expected the folder of one of them")
        yield from _numbered(path, found)
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
    logging.set_verbosity(logging.CRITICAL)  # what goes wrong is said in our line
    try:
        return load()
    except Exception as error:  # datasets has no common base for what goes wrong
        expected = "expected a file, a folder or a data set of the Hub"
        raise ConfigError(f"prompts={source}; {expected} ({reason_of(error)})") from error
    finally:
        logging.set_verbosity(level)


def _numbered(name: str | Path, rows: Dataset | IterableDataset) -> Iterator[Row]:
    found, number = iter(rows), 0
    while (row := _loaded(name, lambda: next(found, None))) is not None:  # damaged columns show when they are read
        number += 1
        yield f"{name}:{number}", row


def _json(path: Path) -> Iterator[Row]:
    """JSON lines, or one array of objects. Read without `datasets`, whose errors do not name the line."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            if path.suffix == ".json" and file.read(1) == "[":
                file.seek(0)
                yield from _array(path, file.read())
                return
            file.seek(0)
            number = 0
            while line := file.readline(LONGEST_ROW):
                number += 1
                if len(line) == LONGEST_ROW:
                    raise ConfigError(f"{path}:{number}: a line of {LONGEST_ROW} characters or more; expected shorter")
                if line.strip():
                    yield f"{path}:{number}", _object(f"{path}:{number}", line)
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as text ({reason_of(error)}); expected JSON in UTF-8") from error


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
