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
from draftsmith.distill.data_section import ServerSection, SourceSection, TeacherServerSection
from draftsmith.heads.configs import DRAFTERS
from draftsmith.train.recipe import SECTIONS, Recipe

FOLDER = Path(__file__).parent / "reference"
RECIPE_HEAD = """# Recipe keys

A recipe is a YAML file of these keys with their defaults; `name`, `output` and `drafter.type` are required.
`draftsmith train RECIPE section.key=value` overrides a key. For completion in an editor, run
`draftsmith recipes --schema > recipe.schema.json`, and begin the recipe with
`# yaml-language-server: $schema=recipe.schema.json`. `python docs/generate.py` writes this page from the code.
"""
COMMAND_HEAD = """# Command line

`draftsmith COMMAND --help` prints the same; `draftsmith --install-completion` completes commands and options in the
shell. Bad input ends with exit code 2 and one line that names the option, its value and the accepted values;
a crash ends with exit code 70.
`python docs/generate.py` writes this page from the code.
"""


def recipe_page() -> str:
    """Return the page of all recipe keys, section by section; keys of several drafters are described once."""
    parts = [RECIPE_HEAD, _section("Top level", _keys(Recipe, but=(*SECTIONS, "drafter")))]
    for name, section in SECTIONS.items():
        parts.append(_section(f"`{name}`", _keys(section), Recipe.model_fields[name].description or ""))
        if name == "data":
            parts.append(_section("A source in a list of `prompts`", _keys(SourceSection)))
            parts.append(_section("`data.server`", _keys(ServerSection)))
        if name == "teacher":
            parts.append(_section("`teacher.server`", _keys(TeacherServerSection)))
    drafters = {name: _keys(entry.section, but=("type",)) for name, entry in DRAFTERS.items()}
    shared = [
        line for line, count in Counter(line for lines in drafters.values() for line in lines).items() if count > 1
    ]
    parts.append(_section("`drafter`", shared, "`drafter.type` chooses the drafter. Keys of several types:"))
    for name, lines in drafters.items():
        others = [line.split("`")[1].partition("=")[0] for line in lines if line in shared]
        about = f"Also {', '.join(f'`{key}`' for key in others)}." if others else ""
        parts.append(_section(f"`{name}`", [line for line in lines if line not in shared], about, "###"))
    return "".join(parts)


def _section(title: str, lines: Iterable[str], about: str = "", level: str = "##") -> str:
    return "\n\n".join(part for part in (f"\n{level} {title}", about, "\n".join(lines)) if part) + "\n"


def _keys(section: type[BaseModel], but: Iterable[str] = ()) -> list[str]:
    """Return a list item for each key: its name and default, accepted words and meaning."""
    return [
        f"- `{name}{_default(field)}`: {' '.join((_values(field) + (field.description or '')).split())}"
        for name, field in section.model_fields.items()
        if name not in but
    ]


def _default(field: FieldInfo) -> str:
    value = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None or value in ({}, []) else f"={_yaml(value)}"


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
    shared = {line: line.split("`")[1].split("=")[0] for line, count in described.items() if count > 1}
    parts = [COMMAND_HEAD]
    for name, command in commands:
        options = [_described(option) for option in _options(command)]
        own = [line for line in options if line not in shared]
        about = _sentence(command.help)
        if others := ", ".join(f"`{shared[line]}`" for line in options if line in shared):
            about += f" [Shared](#shared-options): {others}."
        parts.append(_section(f"`{name}{_arguments(command)}`", own, about))
    return "".join([*parts, _section("Shared options", shared)])


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


def _described(option: Any) -> str:
    """Return the list item of an option: its name and default, and its meaning."""
    default = option.default
    plain = default is not None and not callable(default) and not isinstance(default, bool) and default != ()
    return f"- `{option.opts[0]}{f'={default}' if plain else ''}`: {_sentence(option.help)}"


def _sentence(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split())


PAGES = {"recipe-keys.md": recipe_page, "command-line.md": command_page}
"""Each page and the function that returns its text."""

if __name__ == "__main__":
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text(), encoding="utf-8")
