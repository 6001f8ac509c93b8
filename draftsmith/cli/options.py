"""Options that several commands share, checked before any package is loaded, and the `next:` lines."""

import difflib
import inspect
import json
import math
import os.path
import shlex
from collections.abc import Callable, Iterable
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from draftsmith.decode.policies import POLICIES, check_policy
from draftsmith.decode.rules import RULES
from draftsmith.errors import ConfigError
from draftsmith.names import (
    DTYPES,
    EMBEDDED,
    check_attention,
    check_drafter_name,
    check_prompts_name,
    check_target_name,
    check_template_name,
    drafter_of,
    require_cached_prompts,
    require_cached_without_hub,
)
from draftsmith.reading import parse_assignment, specified_name
from draftsmith.terminal import printable

if TYPE_CHECKING:
    from draftsmith.eval.settings import PairSettings
    from draftsmith.train.recipe import Recipe

Param = typer.CallbackParam
Command = TypeVar("Command", bound=Callable[..., None])
AnySettings = TypeVar("AnySettings", bound="PairSettings")


def _option(param: Param) -> str:
    """Return the name of an option as users write it."""
    return max(param.opts, key=len) if param.opts[0].startswith("-") else str(param.name)


def _checked(*checks: Callable[[str, str], None]) -> Callable[[Param, str | None], str | None]:
    """Return a callback that checks a name before any package is loaded, by functions of the name and the option."""

    def callback(param: Param, name: str | None) -> str | None:
        if name is not None:
            for check in checks:
                check(name, _option(param))
        return name

    return callback


def _within(least: float, most: float = math.inf) -> Callable[[Param, Any], Any]:
    """Return a callback that checks a number, or each number of a list."""

    def callback(param: Param, given: Any) -> Any:
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                upper = "" if most == math.inf else f" and at most {most:g}"
                raise ConfigError(f"{_option(param)}={value}; expected >= {least:g}{upper}")
        return given

    return callback


def _one_of(names: Iterable[str]) -> Callable[[Param, str | None], str | None]:
    """Return a callback that accepts these names."""

    def callback(param: Param, name: str | None) -> str | None:
        if name is not None and name not in names:
            raise ConfigError(f"{_option(param)}={name}; expected one of {', '.join(names)}")
        return name

    return callback


def checked_policy(param: Param, given: str | list[str] | None) -> Any:
    """Check `POLICY`, or each `POLICY` and `DRAFTER=POLICY` of a list."""
    for text in given if isinstance(given, list) else [given] if given is not None else []:
        drafter, named, policy = text.partition("=")
        check_policy(policy if named and ":" not in drafter else text, _option(param))
    return given


def _check_attention_name(name: str, key: str) -> None:
    check_attention(key, name, "bfloat16")  # whether it goes with the dtype is checked with the other options


def _check_folder(name: str, key: str) -> None:
    if not Path(name).is_dir():
        raise ConfigError(f"{key}={name}; expected a folder, and there is none")


checked_prompts = _checked(check_prompts_name, require_cached_prompts)
at_least_one, not_negative = _within(1), _within(0)
REQUIRED, KEYWORD = Parameter.empty, Parameter.KEYWORD_ONLY
SAMPLING, LOADING = "Sampling", "Loading and passes"
"""Panels of `--help`."""
DRAFTER_HELP = (
    "Drafter: a folder or Hub id, optionally with @revision, or without training: prompt-lookup, suffix, "
    "early-exit:layers=N, native-mtp, hybrid:drafter=FOLDER. "
)
POLICY_HELP = f"Draft policy: {', '.join(POLICIES)}, with settings as in best-first:size=16,depth=8."
TARGET_HELP = "Target: 'embedded', a local folder, a GGUF file or a Hub id."
PROMPTS_HELP = "Prompts: 'embedded', a file (JSONL, JSON, Parquet, text) or a Hub data set."
RULE_HELP = "Verification rule; default: the best lossless one."
TEMPLATE_HELP = "A file, 'vicuna', or 'plain' (texts joined by line breaks); default: the tokenizer's template."
IMAGES_HELP = "Folder of the images that prompts name; default: that of the prompts."
ATTENTION_HELP = "Attention of the target: sdpa, eager, flash_attention_2, ..."
Texts, Numbers = list[str] | None, list[int] | None


def _shared(
    kind: Any, default: Any, name: str, help: str, check: Any = None, panel: str | None = None
) -> tuple[Any, Any]:
    """Return the annotation and the default of an option."""
    metavar = "" if kind is bool else None  # typer would print the type of a flag, too
    option = typer.Option(name, help=help, callback=check, metavar=metavar, rich_help_panel=panel)
    return Annotated[kind, option], default


def flag(name: str, help: str) -> Any:
    """Return an option without a value, for an annotation."""
    return typer.Option(name, help=help, metavar="")


OPTIONS: dict[str, tuple[Any, Any]] = {
    "target": _shared(str, REQUIRED, "--target", TARGET_HELP, _checked(check_target_name, require_cached_without_hub)),
    "drafters": _shared(Texts, None, "--drafter", DRAFTER_HELP + "Or name=DRAFTER; repeatable."),
    "prompts": _shared(str, EMBEDDED, "--prompts", PROMPTS_HELP, checked_prompts),
    "subset": _shared(str | None, None, "--subset", "Configuration of a Hub data set."),
    "split": _shared(str, "train", "--split", "Split of a Hub data set."),
    "count": _shared(int | None, None, "--count", "Most prompts to use.", at_least_one),
    "draft_length": _shared(int | None, None, "--gamma", "Draft length; default: each drafter's own.", at_least_one),
    "policies": _shared(
        Texts, None, "--policy", POLICY_HELP + " Repeatable; NAME=POLICY is for one drafter.", checked_policy
    ),
    "batch_sizes": _shared(
        Numbers, None, "--batch-size", "Prompts decoded together; repeatable; default: 1.", at_least_one
    ),
    "max_new_tokens": _shared(int, 96, "--max-new-tokens", "Most new tokens per turn.", at_least_one),
    "repeats": _shared(int, 3, "--repeats", "Times that every text is generated.", at_least_one),
    "out": _shared(Path, REQUIRED, "--out", "Folder for the report; the same command continues a run."),
    "as_json": _shared(bool, False, "--json", "Print the result as JSON, instead of tables."),
    "temperatures": _shared(
        list[float] | None, None, "--temperature", "Repeatable; default: 0 (greedy) and 1.", not_negative, SAMPLING
    ),
    "rule": _shared(str | None, None, "--rule", RULE_HELP, _one_of(RULES), SAMPLING),
    "top_k": _shared(int | None, None, "--top-k", "Sample from the k likeliest tokens.", at_least_one, SAMPLING),
    "top_p": _shared(
        float | None, None, "--top-p", "Sample from the smallest set of probability p.", _within(0, 1), SAMPLING
    ),
    "seed": _shared(int, 0, "--seed", "Seed of sampling.", None, SAMPLING),
    "dtype": _shared(str, DTYPES[0], "--dtype", f"The target's: {', '.join(DTYPES)}.", _one_of(DTYPES), LOADING),
    "attn_implementation": _shared(
        str | None, None, "--attn-implementation", ATTENTION_HELP, _checked(_check_attention_name), LOADING
    ),
    "compile": _shared(
        bool, False, "--compile", "Compile the passes with torch.compile; on CUDA as CUDA graphs.", None, LOADING
    ),
    "invariant": _shared(
        bool, False, "--invariant", "Passes of one shape: greedy texts equal the target's bit by bit.", None, LOADING
    ),
    "images": _shared(str | None, None, "--images", IMAGES_HELP, _checked(_check_folder), LOADING),
    "chat_template": _shared(
        str | None, None, "--chat-template", TEMPLATE_HELP, _checked(check_template_name), LOADING
    ),
    "template_options": _shared(
        Texts, None, "--template-option", "Variable key=value of the chat template; repeatable.", None, LOADING
    ),
    "trust_remote_code": _shared(
        bool, False, "--trust-remote-code", "Run code from the target's repository.", None, LOADING
    ),
}
"""Options of several commands by the name of their setting: annotation and default."""
TEMPLATE = ("chat_template", "template_options")
LOADED = ("dtype", "attn_implementation", "trust_remote_code")
"""Options of the commands that use a chat template, and of those that load a target."""


def taking(*names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Add options of `OPTIONS` to a command, before its own; it gets their values as keyword arguments.

    Args:
        names: with the defaults of the table.
        defaults: further names with their defaults for this command.
    """

    def decorate(command: Command) -> Command:
        chosen = {name: OPTIONS[name][1] for name in names} | defaults
        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [Parameter(name, KEYWORD, default=chosen[name], annotation=OPTIONS[name][0]) for name in chosen]
        kept = [each for each in own if each.name not in chosen and each.kind is not Parameter.VAR_KEYWORD]
        parameters += [each.replace(kind=KEYWORD) for each in kept]
        # typer reads both.
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def settings_of(kind: type[AnySettings], given: dict[str, Any], **own: Any) -> AnySettings:
    """Return the settings that a command's options describe; where an option is None, the setting has its default."""
    values = {name: value for name, value in {**given, **own}.items() if value is not None}
    values["template_options"] = template_options(values.get("template_options"))
    plain: dict[str, Any] = {name: tuple(value) if type(value) is list else value for name, value in values.items()}
    return kind(**plain)


def print_json(value: Any) -> None:
    """Print `value` as JSON for other programs, in ASCII: no text in it reaches a terminal as control characters."""
    typer.echo(json.dumps(value, indent=2))


def suggest(*words: object, to_stderr: bool = False) -> None:
    """Print the command that usually follows, from the words of its command line."""
    typer.echo(printable(f"next: {shlex.join(map(str, words))}"), err=to_stderr)


def measuring(command: str, settings: "PairSettings", drafters: Iterable[str] | None = None) -> list[str]:
    """Return the words of `eval`, `check` or `forecast` for a target with drafters, loaded as in `settings`.

    `drafters`: in place of those in the settings, for example with names.
    """
    chosen = settings.drafters.values() if drafters is None else drafters
    words = [command, "--target", settings.target, *(word for one in chosen for word in ("--drafter", one))]
    words += ["--prompts", settings.prompts] if settings.prompts != EMBEDDED else []
    words += ["--dtype", settings.dtype] if settings.dtype != DTYPES[0] else []
    if settings.attn_implementation is not None:
        words += ["--attn-implementation", settings.attn_implementation]
    words += template_words(settings)
    if settings.images is not None and command != "forecast":
        words += ["--images", settings.images]
    words += ["--invariant"] if settings.invariant and command != "forecast" else []
    return words


def template_words(settings: "PairSettings") -> list[str]:
    """Return the words that set the chat template and its variables."""
    words = [] if settings.chat_template is None else ["--chat-template", settings.chat_template]
    for name, value in settings.template_options.items():
        words += ["--template-option", f"{name}={json.dumps(value)}"]
    return words


def checked_recipe(name: str, overrides: list[str] | None) -> "Recipe":
    """Return a recipe whose target and files exist."""
    from draftsmith.train.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    recipe.require_paths()
    require_cached_without_hub(recipe.target.model, "target.model")
    require_cached_prompts(recipe.data.prompts, "data.prompts")
    require_cached_prompts(recipe.evaluation.prompts or EMBEDDED, "evaluation.prompts")
    return recipe


def named_drafters(drafters: list[str]) -> dict[str, str]:
    """Return `name=folder` entries as a dict; a plain `folder` is named after its last part.

    Raises:
        ConfigError: for a repeated name, and for a local folder that does not exist.
    """
    from draftsmith.heads.configs import is_named

    named: dict[str, str] = {}
    for entry in map(os.path.expanduser, drafters):
        name, equals, folder = entry.partition("=")
        # suffix:min_match=3 is a drafter with a setting, runs/lr=0.1/drafter a folder: neither gives a name.
        if not equals or ":" in name or Path(entry).is_dir():
            parts = [part for part in Path(entry).parts if part not in ("drafter", "/")]
            name, folder = (specified_name(entry) if is_named(entry) else parts[-1] if parts else entry), entry
        if name in named:
            raise ConfigError(f"drafter={entry}: the name {name!r} is taken; expected name=folder with another name")
        if not is_named(folder):
            check_drafter_name(folder, "--drafter")
        named[name] = os.path.expanduser(drafter_of(folder))
    return named


def checked_drafters(drafters: list[str]) -> dict[str, str]:
    """Return `named_drafters`, each of which is a folder, a name or, where the Hub can be asked, a Hub id."""
    from draftsmith.heads.configs import SETTINGS, is_named, parse_named

    named = named_drafters(drafters)
    for folder in named.values():
        own = parse_named(folder)[1].get("drafter") if is_named(folder) else folder
        if own is not None and not is_named(own):
            close = [] if Path(own).exists() else difflib.get_close_matches(specified_name(own), SETTINGS, 1)
            if close:
                raise ConfigError(f"--drafter={own}; did you mean {close[0]}?")
            check_drafter_name(own, "--drafter")
            require_cached_without_hub(own, "--drafter")
    return named


def template_options(entries: list[str] | None) -> dict[str, Any]:
    """Return `key=value` entries, such as `enable_thinking=false`, as a dict of YAML values."""
    return dict(parse_assignment(f"--template-option {entry}", entry) for entry in entries or [])
