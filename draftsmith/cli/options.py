"""Options of commands, generated from their settings and checked before torch is imported, and the `next:` lines."""

import inspect
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, cast, get_args, get_origin

import typer

from draftsmith.config import FieldPath, Section, meaning, section_of
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import PairSettings, named_drafters
from draftsmith.names import DTYPES, EMBEDDED, require_cached_prompts, require_cached_without_hub
from draftsmith.option_fields import OptionField, check_options, only, option_fields
from draftsmith.storage import require_folder
from draftsmith.terminal import printable

if TYPE_CHECKING:
    from draftsmith.train.recipe import Recipe

Command = TypeVar("Command", bound=Callable[..., None])
AnySettings = TypeVar("AnySettings", bound=Section)
KEYWORD = Parameter.KEYWORD_ONLY
SAMPLING, LOADING = "Sampling", "Loading and passes"
PANELS: dict[str, str] = dict.fromkeys(("--temperature", "--rule", "--top-k", "--top-p", "--seed"), SAMPLING)
PANELS |= dict.fromkeys(("--dtype", "--attn-implementation", "--trust-remote-code", "--compile"), LOADING)
PANELS |= dict.fromkeys(("--invariant", "--images", "--chat-template", "--template-option"), LOADING)
"""Panels of `--help` by option."""
CONTINUES = "what is finished is kept, and the same command continues"
AGAIN = "nothing is stored, and the same command begins again"
TYPED = (bool, int, float, Path)
"""Types of single values that typer reads and names in `--help`; others are read as text."""


def flag(name: str, help: str) -> Any:
    """Return an option without a value, for an annotation."""
    return typer.Option(name, help=help, metavar="")


Json = Annotated[bool, flag("--json", "Print the result as JSON, instead of tables.")]
OUT = typer.Option("--out", help="Folder for the report; the same command continues a run.")
Out = Annotated[Path, OUT]
Overwrite = Annotated[bool, flag("--overwrite", "Replace another measurement in that folder.")]


def with_settings(command: Command, *, group: bool = False) -> Command:
    """Return a command whose parameter `settings` is replaced by an option for each field of its annotation.

    The command is called when all values are valid, what they name exists and, last, the Hub has it.

    Args:
        group: there are subcommands, without which it is called.
    """
    own = inspect.signature(command, eval_str=True).parameters
    kind = own["settings"].annotation
    fields = {_parameter(field): field for field in option_fields(kind)}
    parameters = [_as_parameter(name, field, required=not group) for name, field in fields.items()]
    parameters += [each.replace(kind=KEYWORD) for name, each in own.items() if name != "settings"]
    parameters += [Parameter("called", KEYWORD, annotation=typer.Context)]

    @wraps(command)
    def run(called: typer.Context, **given: Any) -> None:
        if called.invoked_subcommand is None:
            if (out := given.get("out")) is not None:
                require_folder("out", out)
            values = {field.path: _parsed(field, given.pop(name)) for name, field in fields.items()}
            command(settings=settings_of(kind, values), **given)

    # typer reads both.
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return cast(Command, run)


def settings_of(kind: type[AnySettings], values: dict[FieldPath, Any]) -> AnySettings:
    """Return the settings of their options' values, which are None where none is given; see `with_settings`."""
    fields = {field.path: field for field in option_fields(kind)}

    def key(path: FieldPath) -> str:
        return next((fields[path[:size]].name for size in range(len(path), 0, -1) if path[:size] in fields), str(path))

    nested: dict[str, Any] = {}
    for path, value in values.items():
        if value is None:
            continue
        switch = fields[path].switch
        if switch is not None and values[switch] is None and path != switch:
            raise ConfigError(f"{key(path)} without {key(switch)}; expected {meaning(fields[switch].field)}")
        place = nested
        for name in path[:-1]:
            place = place.setdefault(str(name), {})
        place[str(path[-1])] = value
    settings = section_of(kind, key, nested)
    check_options(settings, key)
    return settings


def _parameter(field: OptionField) -> str:
    """Return the name of a parameter of Python."""
    return field.name if field.form.argument else "_".join(map(str, field.path))


def _as_parameter(name: str, field: OptionField, *, required: bool) -> Parameter:
    """Return the parameter from which typer makes the option."""
    form, default, kind = field.form, field.default, field.form.kind or _typed(field.field.annotation)
    help = " ".join((form.help or field.field.description or "").split())
    if field.switch is not None:
        shown = f"{default:g}" if isinstance(default, int | float) else default
        help = help if default in (None, ..., {}) else f"{help.rstrip('.')}; default: {shown}."
        default = None
    if form.parse is only:
        default = next(iter(default or ()), None)
    several = get_origin(kind) is list or isinstance(default, dict | tuple)
    given = Parameter.empty if default is ... and required else None if default is ... or several else default
    if form.argument:
        option: Any = typer.Argument(help=help, metavar=field.name.upper())
    else:
        texts = {"help": help, "rich_help_panel": PANELS.get(field.name)}
        metavar = "" if kind is bool else None  # typer would print the type of a flag, too
        option = typer.Option(field.name, *form.also, metavar=metavar, **texts)
    kind = kind | None if given is None else kind
    return Parameter(name, KEYWORD, default=given, annotation=Annotated[kind, option])


def _typed(annotation: Any) -> Any:
    """Return the type that typer reads for a field's annotation."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _typed(inner[0])
    if origin in (list, tuple):
        return list[_typed(inner[0])]
    if origin in (UnionType, Union):
        return _typed(next(one for one in inner if one is not NoneType))
    return annotation if annotation in TYPED else str


def _parsed(field: OptionField, value: Any) -> Any:
    """Return the value of a field for what is typed; None where nothing is."""
    if value is None or value == []:
        return None
    return value if field.form.parse is None else field.form.parse(value, field.name)


@contextmanager
def interruptible(outcome: Callable[[], str]) -> Iterator[None]:
    """Say on Ctrl-C what is kept, and whether the same command continues."""
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"interrupted; {outcome()}") from stop


def print_json(value: Any) -> None:
    """Print `value` as JSON for other programs, in ASCII: no text in it reaches a terminal as control characters."""
    typer.echo(json.dumps(value, indent=2))


def suggest(*words: object, to_stderr: bool = False) -> None:
    """Print the command that usually follows, from the words of its command line."""
    typer.echo(printable(f"next: {shlex.join(map(str, words))}"), err=to_stderr)


def measuring(command: str, settings: PairSettings) -> list[str]:
    """Return the words of `eval`, `check` or `forecast` for a target with drafters, loaded as in `settings`."""
    words = [command, "--target", settings.target]
    for name, folder in settings.drafters.items():
        words += ["--drafter", folder if named_drafters(folder) == {name: folder} else f"{name}={folder}"]
    words += ["--prompts", settings.prompts] if settings.prompts != EMBEDDED else []
    words += ["--dtype", settings.dtype] if settings.dtype != DTYPES[0] else []
    if settings.attn_implementation is not None:
        words += ["--attn-implementation", settings.attn_implementation]
    words += template_words(settings)
    if settings.images is not None and command != "forecast":
        words += ["--images", settings.images]
    words += ["--invariant"] if settings.invariant and command != "forecast" else []
    return words


def template_words(settings: PairSettings) -> list[str]:
    """Return the words that set the chat template and its variables."""
    words = [] if settings.chat_template is None else ["--chat-template", settings.chat_template]
    for name, value in settings.template_options.items():
        words += ["--template-option", f"{name}={json.dumps(value)}"]
    return words


def checked_recipe(name: str, overrides: list[str] | None, *, read_prompts: bool = True) -> "Recipe":
    """Return a recipe whose target and files exist; `read_prompts`: also its prompts, in files or on the Hub."""
    from draftsmith.distill.data_section import for_each_source
    from draftsmith.train.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    recipe.require_paths(read_prompts)
    require_folder("output", Path(recipe.output))
    require_cached_without_hub(recipe.target.model, "target.model")
    for key, drafter in {"start_from": recipe.start_from, "drafter.model": recipe.draft_model}.items():
        if drafter is not None:
            require_cached_without_hub(drafter, key)
    if not read_prompts:
        return recipe
    for_each_source(require_cached_prompts)(recipe.data.prompts, "data.prompts")
    for_each_source(require_cached_prompts)(recipe.evaluation.prompts, "evaluation.prompts")
    return recipe
