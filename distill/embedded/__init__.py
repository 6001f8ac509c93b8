"""The embedded target, a small Llama that writes Python code, and its corpus.

The weights are part of the package. The corpus is the code of Python's standard library without comments, split by
module.
"""

import ast
import hashlib
import random
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from draftsmith.errors import ConfigError

Split = Literal["train", "heldout"]

# Tests and demos are repetitive, encodings and Unicode tables are data, and site-packages is not the standard library.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "site-packages", "dist-packages")
)
SKIPPED_FILES = frozenset({"html/entities.py"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
MAX_BYTES = 300_000
HELDOUT_PERCENT = 10
SPLIT_SALT = "pencil/"
"""Chosen so that each kind of module has held-out text."""

KINDS: dict[str, str] = {
    "network": (
        "asyncio email ftplib http imaplib mailbox mimetypes nntplib poplib selectors smtpd smtplib socket "
        "socketserver ssl telnetlib urllib uuid webbrowser wsgiref xmlrpc ipaddress netrc cgi cgitb asyncore asynchat"
    ),
    "text": (
        "argparse base64 configparser csv difflib fnmatch gettext getopt html json locale optparse plistlib pprint "
        "quopri re sre_compile sre_constants sre_parse reprlib shlex string stringprep textwrap tomllib xml"
    ),
    "data": (
        "array bisect calendar collections copy csv datetime dbm decimal _pydecimal _pydatetime enum fractions "
        "graphlib gzip bz2 lzma hashlib heapq numbers pickle pickletools random shelve sqlite3 statistics tarfile "
        "zipfile zoneinfo _strptime _collections_abc types weakref operator functools"
    ),
    "runtime": (
        "abc ast bdb cProfile code codeop compileall concurrent contextlib ctypes dataclasses dis distutils doctest "
        "importlib inspect logging multiprocessing ntpath opcode os pathlib pdb pkgutil platform posixpath profile "
        "pstats py_compile pyclbr pydoc queue runpy sched shutil signal site subprocess symtable sysconfig tempfile "
        "threading timeit token tokenize trace traceback tracemalloc typing unittest venv warnings zipapp zipimport "
        "_pyio _pyrepl glob io stat filecmp fileinput"
    ),
}
"""Top-level modules by subject; all others are `other`."""


def embedded_target() -> Path:
    """Return the folder of the embedded target in transformers format, with `build.json`: how it was trained."""
    return Path(__file__).resolve().parent / "weights"


@dataclass(frozen=True)
class Module:
    """A module of the standard library: its path relative to the library's root, and its text."""

    path: str
    text: str

    @property
    def package(self) -> str:
        """`email/message.py` -> `email`, `argparse.py` -> `argparse`."""
        return self.path.removesuffix(".py").split("/")[0]

    @property
    def kind(self) -> str:
        """The module's subject: a key of KINDS, or `other`."""
        return next((kind for kind, names in KINDS.items() if self.package in names.split()), "other")

    @property
    def split(self) -> Split:
        """Chosen by a hash of the path: the same on every machine and in every Python version."""
        draw = int(hashlib.sha256((SPLIT_SALT + self.path).encode()).hexdigest()[:8], 16) % 100
        return "heldout" if draw < HELDOUT_PERCENT else "train"


class EmbeddedPrompt(NamedTuple):
    """A window of a module's code, which starts at the line `id` = `path:line` of that code."""

    id: str
    category: str
    """The module's kind."""
    input_ids: list[int]


def _wanted(relative: Path) -> bool:
    return (
        not SKIPPED_FOLDERS.intersection(relative.parts[:-1])
        and relative.as_posix() not in SKIPPED_FILES
        and not relative.parts[0].startswith(SKIPPED_PREFIXES)
    )


def code_of(text: str) -> str:
    """Return Python source without comments and docstrings, in the layout of `ast.unparse`.

    Raises:
        SyntaxError: if this Python cannot parse the text.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree) + "\n"


@lru_cache(maxsize=1)
def _sources() -> tuple[Module, ...]:
    """Return every module of the standard library that belongs to the corpus, as it is written."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _wanted(relative) or path.stat().st_size > MAX_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            modules.append(Module(relative.as_posix(), text))
    return tuple(modules)


@lru_cache(maxsize=4)
def read_modules(split: Split, packages: tuple[str, ...] | None = None) -> list[Module]:
    """Return the code of a split's modules in path order, only of the top-level `packages` if given.

    Raises:
        ConfigError: if this Python was installed without its sources.
    """
    modules = []
    for source in _sources():
        if source.split != split or (packages is not None and source.package not in packages):
            continue
        with suppress(SyntaxError):
            modules.append(Module(source.path, code_of(source.text)))
    if not modules:
        raise ConfigError.of("target", "embedded", f"a Python with its library's {split} sources (.py files)")
    return modules


def _windows(tokenizer: Any, module: Module, prompt_tokens: int, seed: int) -> Iterator[EmbeddedPrompt]:
    """Yield windows of one module that start at its non-blank lines, in random order."""
    lines = module.text.splitlines(keepends=True)
    order = [number for number, line in enumerate(lines) if line.strip()]
    random.Random(f"{seed}:{module.path}").shuffle(order)
    too_late = len(lines)  # From this line on, the rest of the module is shorter than a window.
    for first in order:
        if first >= too_late:
            continue
        # A token is hardly ever longer than 16 characters of source code, so this cut is enough for a window.
        text = "".join(lines[first : first + prompt_tokens])[: 16 * prompt_tokens]
        input_ids = tokenizer(text, verbose=False)["input_ids"][:prompt_tokens]
        if len(input_ids) == prompt_tokens:
            yield EmbeddedPrompt(f"{module.path}:{first + 1}", module.kind, input_ids)
        elif first + prompt_tokens >= len(lines) and len(text) < 16 * prompt_tokens:
            too_late = first


def embedded_prompts(
    tokenizer: Any, split: Split, count: int, prompt_tokens: int, seed: int = 0
) -> list[EmbeddedPrompt]:
    """Return `count` prompts of `prompt_tokens` tokens each, cut from the modules of a split.

    Windows start at a line. Every module gives one window before any module gives a second one. The same arguments give
    the same prompts.

    Raises:
        ConfigError: if `count` or `prompt_tokens` is not positive, or the split has fewer windows than `count`.
    """
    for key, value in (("count", count), ("prompt_tokens", prompt_tokens)):
        if value < 1:
            raise ConfigError.of(key, value, ">= 1")
    modules = list(read_modules(split))
    random.Random(f"{seed}:{split}").shuffle(modules)
    sources = [_windows(tokenizer, module, prompt_tokens, seed) for module in modules]
    rows: list[EmbeddedPrompt] = []
    while sources:
        alive = []
        for source in sources:
            row = next(source, None)
            if row is None:
                continue
            rows.append(row)
            if len(rows) == count:
                return rows
            alive.append(source)
        sources = alive
    raise ConfigError.of("count", count, f"<= {len(rows)}, the {split} windows of {prompt_tokens} tokens")
