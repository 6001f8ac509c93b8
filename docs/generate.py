"""Write the pages of the reference that come from the code: `python docs/generate.py`. A test compares them."""

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from draftsmith.cli import app
from draftsmith.distill.server.settings import ServerSection
from draftsmith.heads.configs import DRAFTERS
from draftsmith.train.recipe import SECTIONS, Recipe

FOLDER = Path(__file__).parent / "reference"
SHARED_BY = 3
"""Commands from which an option with the same help is described once for all of them."""
RECIPE_HEAD = """# Recipe keys

A recipe is a YAML file with the sections below; only `name`, `output` and `drafter` are required.
`draftsmith train RECIPE section.key=value` overrides a key. Unknown keys are refused, with the nearest name. This page
is generated from the code by `python docs/generate.py`.

For completion and checks in an editor, run `draftsmith recipes --schema > recipe.schema.json`, and begin the recipe
with `# yaml-language-server: $schema=recipe.schema.json`.
"""
COMMAND_HEAD = """# Command line

`draftsmith COMMAND --help` prints the same; `draftsmith --install-completion` completes commands and options in the
shell. Bad input ends with exit code 2 and one line that names the option, its value and the accepted values. This page
is generated from the code by `python docs/generate.py`.
"""


def recipe_page() -> str:
    """Return the page of all recipe keys, section by section."""
    parts = [RECIPE_HEAD, _keys("Top level", Recipe, but=(*SECTIONS, "drafter"))]
    for name, section in SECTIONS.items():
        parts.append(_keys(f"`{name}`", section))
        if name == "data":
            parts.append(_keys("`data.server`", ServerSection))
    parts.append("\n## `drafter`\n\n`drafter.type` chooses the drafter; the other keys depend on it.\n")
    parts += [_keys(f"`{name}`", entry.section, "###", but=("type",)) for name, entry in DRAFTERS.items()]
    return "".join(parts)


def _keys(title: str, section: type[BaseModel], level: str = "##", but: Iterable[str] = ()) -> str:
    rows = [
        (f"`{name}`", _default(field), _values(field) + (field.description or ""))
        for name, field in section.model_fields.items()
        if name not in but
    ]
    about = "" if but else Recipe.model_fields.get(title.strip("`"), FieldInfo()).description
    intro = f"{about}\n\n" if about else ""
    return f"\n{level} {title}\n\n{intro}{_table(('key', 'default', 'meaning'), rows)}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None or value in ({}, []) else f"`{_yaml(value)}`"


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: FieldInfo) -> str:
    """Return the accepted words of a key, if its type lists them and its description does not."""
    words = [word for word in _literals(field.annotation) if str(word) not in (field.description or "")]
    listed = [f"`{word}`" for word in _literals(field.annotation)]
    return f"One of {', '.join(listed)}. " if words and len(listed) > 1 else ""


def _literals(kind: Any) -> Iterator[Any]:
    if "Literal" in str(get_origin(kind)):
        yield from get_args(kind)
    elif get_origin(kind) is not dict:
        for inner in get_args(kind):
            yield from _literals(inner)


def command_page() -> str:
    """Return the page of all commands with their options; options of several commands are described once."""
    commands = list(_commands("draftsmith", get_command(app)))
    described = Counter(_described(option) for _, command in commands for option in _options(command))
    shared = {line for line, count in described.items() if count >= SHARED_BY}
    parts = [COMMAND_HEAD]
    for name, command in commands:
        options = [_described(option) for option in _options(command)]
        parts.append(f"\n## `{name}{_arguments(command)}`\n\n{_sentence(command.help)}\n")
        own = [line for line in options if line not in shared]
        if own:
            parts.append("\n" + _table(("option", "default", "meaning"), own))
        others = ", ".join(line[0] for line in options if line in shared)
        if others:
            parts.append(f"\n[Shared options](#shared-options): {others}.\n")
    rows = [line for line in described if line in shared]
    parts.append(f"\n## Shared options\n\n{_table(('option', 'default', 'meaning'), rows)}")
    return "".join(parts)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield every command that can be called, with its whole name."""
    inner = getattr(command, "commands", {})
    if not inner or (_options(command) and name != "draftsmith"):
        yield name, command
    for key, value in inner.items():
        yield from _commands(f"{name} {key}", value)


def _options(command: Any) -> list[Any]:
    return [option for option in command.params if option.param_type_name == "option" and not option.hidden]


def _arguments(command: Any) -> str:
    """Return the arguments as words of a synopsis."""
    words = []
    for argument in (parameter for parameter in command.params if parameter.param_type_name == "argument"):
        word = argument.name.upper() + (" ..." if argument.nargs == -1 else "")
        words.append(f" {word}" if argument.required else f" [{word}]")
    return "".join(words)


def _described(option: Any) -> tuple[str, str, str]:
    default = option.default
    plain = default is not None and not callable(default) and not isinstance(default, bool) and default != ()
    return f"`{option.opts[0]}`", f"`{default}`" if plain else "", _sentence(option.help)


def _sentence(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in (head, ("---",) * len(head), *rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"recipe-keys.md": recipe_page, "command-line.md": command_page}
"""Each page and the function that returns its text."""

if __name__ == "__main__":
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")
