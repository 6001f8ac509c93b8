"""Options that several commands share."""

import json
import math
import os.path
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.errors import ConfigError
from draftsmith.names import (
    DTYPES,
    EMBEDDED,
    POLICIES,
    RULES,
    check_attention,
    check_drafter_name,
    check_prompts_name,
    check_target_name,
    check_template_name,
    drafter_of,
    require_cached_without_hub,
)
from draftsmith.reading import parse_assignment, parse_specification, specified_name
from draftsmith.safe_text import printable

if TYPE_CHECKING:
    from draftsmith.eval.settings import PairSettings
    from draftsmith.train.recipe import Recipe


Param = typer.CallbackParam


def _option(param: Param) -> str:
    """Return the name of an option as users write it."""
    return max(param.opts, key=len) if param.opts[0].startswith("-") else str(param.name)


def _checked(check: Callable[[str, str], None], *, on_hub: bool = False) -> Callable[[Param, str | None], str | None]:
    """Return a callback that checks a name before any package is loaded, by a function of the name and the option.

    `on_hub`: a name that is not local is a Hub id.
    """

    def callback(param: Param, name: str | None) -> str | None:
        if name is not None:
            check(name, _option(param))
            if on_hub:
                require_cached_without_hub(name, _option(param))
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
        parse_specification(_option(param), policy if named and ":" not in drafter else text, POLICIES)
    return given


def _check_attention_name(name: str, key: str) -> None:
    check_attention(key, name, "bfloat16")  # whether it goes with the dtype is checked with the other options


def _check_folder(name: str, key: str) -> None:
    if not Path(name).is_dir():
        raise ConfigError(f"{key}={name}; expected a folder, and there is none")


checked_target = _checked(check_target_name, on_hub=True)
checked_prompts = _checked(check_prompts_name)
checked_rule, checked_dtype = _one_of(RULES), _one_of(DTYPES)
at_least_one, not_negative = _within(1), _within(0)
TARGET_HELP = "Target: 'embedded', a local folder or a Hub id."
TargetOption = Annotated[str, typer.Option("--target", help=TARGET_HELP, callback=checked_target)]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="Dtype of the target: float32, bfloat16 or float16.", callback=checked_dtype)
]
AttentionOption = Annotated[
    str | None,
    typer.Option(
        "--attn-implementation",
        help="Attention of the target: sdpa, eager, flash_attention_2, ...",
        callback=_checked(_check_attention_name),
    ),
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the passes with torch.compile; on CUDA as CUDA graphs.")
]
InvariantOption = Annotated[
    bool, typer.Option("--invariant", help="Passes of one shape: greedy texts equal the target's bit by bit.")
]
SubsetOption = Annotated[str | None, typer.Option("--subset", help="Configuration of a Hub data set.")]
SplitOption = Annotated[str, typer.Option("--split", help="Split of a Hub data set.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the target's repository.")]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        help="A file, or 'vicuna'; default: the tokenizer's template.",
        callback=_checked(check_template_name),
    ),
]
TemplateOptionsOption = Annotated[
    list[str] | None, typer.Option("--template-option", help="Variable key=value of the chat template; repeatable.")
]
ImagesOption = Annotated[
    str | None,
    typer.Option(
        "--images",
        help="Folder of the images that prompts name; default: that of the prompts.",
        callback=_checked(_check_folder),
    ),
]
TemperaturesOption = Annotated[
    list[float] | None,
    typer.Option("--temperature", help="Temperature; repeatable; default: 0 and 1.", callback=not_negative),
]
BatchSizesOption = Annotated[
    list[int] | None,
    typer.Option("--batch-size", help="Prompts decoded together; repeatable; default: 1.", callback=at_least_one),
]
PromptsOption = Annotated[
    str, typer.Option("--prompts", help="Prompts: 'embedded' or a file.", callback=checked_prompts)
]
MeasuredOption = Annotated[list[str], typer.Option("--drafter", help="As for `draftsmith eval`; repeatable.")]
CountOption = Annotated[int | None, typer.Option("--count", help="Most prompts to use.", callback=at_least_one)]
DRAFTER_HELP = (
    "Drafter: a folder or Hub id, optionally with @revision, or without training: prompt-lookup, suffix, "
    "early-exit:layers=N, native-mtp, hybrid:drafter=FOLDER."
)
POLICY_HELP = (
    "Draft policy: chain, confidence, adaptive, tree, sampled-tree, best-first or optimal-tree, with settings as in "
    "best-first:size=16,depth=8."
)
RuleOption = Annotated[
    str | None, typer.Option("--rule", help="Verification rule; default: the best lossless one.", callback=checked_rule)
]
TopKOption = Annotated[
    int | None, typer.Option("--top-k", help="Sample from the k most likely tokens.", callback=at_least_one)
]
TopPOption = Annotated[
    float | None, typer.Option("--top-p", help="Sample from the smallest set of probability p.", callback=_within(0, 1))
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of sampling.")]


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, instead of tables.")]


def print_json(value: Any) -> None:
    """Print `value` as JSON for other programs, in ASCII: no text in it reaches a terminal as control characters."""
    typer.echo(json.dumps(value, indent=2))


def suggest(*words: object, to_stderr: bool = False) -> None:
    """Print the command that usually follows, from the words of its command line."""
    typer.echo(printable(f"next: {shlex.join(map(str, words))}"), err=to_stderr)


def measuring(target: str, drafters: Iterable[str], prompts: str, settings: "PairSettings | None" = None) -> list[str]:
    """Return the options that `eval`, `check` and `forecast` share, as words of a command line.

    `settings`: of the command that suggests another one, whose loading options are repeated.
    """
    words = ["--target", target, *(word for drafter in drafters for word in ("--drafter", drafter))]
    words += ["--prompts", prompts] if prompts != EMBEDDED else []
    if settings is None:
        return words
    words += ["--dtype", settings.dtype] if settings.dtype != DTYPES[0] else []
    for name in ("attn_implementation", "chat_template"):
        if (value := getattr(settings, name)) is not None:
            words += [f"--{name.replace('_', '-')}", value]
    for name, value in settings.template_options.items():
        words += ["--template-option", f"{name}={json.dumps(value)}"]
    return words


def checked_recipe(name: str, overrides: list[str] | None) -> "Recipe":
    """Return a recipe whose target and files exist."""
    from draftsmith.train.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    recipe.require_paths()
    require_cached_without_hub(recipe.target.model, "target.model")
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
    from draftsmith.heads.configs import is_named, parse_named

    named = named_drafters(drafters)
    for folder in named.values():
        own = parse_named(folder)[1].get("drafter") if is_named(folder) else folder
        if own is not None and not is_named(own):
            check_drafter_name(own, "--drafter")
            require_cached_without_hub(own, "--drafter")
    return named


def template_options(entries: list[str] | None) -> dict[str, Any]:
    """Return `key=value` entries, such as `enable_thinking=false`, as a dict of YAML values."""
    return dict(parse_assignment(f"--template-option {entry}", entry) for entry in entries or [])
