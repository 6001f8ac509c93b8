"""Options that several commands share."""

import json
import os.path
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.errors import ConfigError
from draftsmith.names import check_drafter_name, check_prompts_name, check_target_name
from draftsmith.reading import parse_assignment, specified_name
from draftsmith.safe_text import printable

if TYPE_CHECKING:
    from draftsmith.train.recipe import Recipe


def _checked(check: Callable[[str], None]) -> Callable[[str | None], str | None]:
    """Return a callback that checks a name before any package is loaded."""

    def callback(name: str | None) -> str | None:
        if name is not None:
            check(name)
        return name

    return callback


checked_target, checked_prompts = _checked(check_target_name), _checked(check_prompts_name)
TARGET_HELP = "Target: 'embedded', a local folder or a Hub id."
TargetOption = Annotated[str, typer.Option("--target", help=TARGET_HELP, callback=checked_target)]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Dtype of the target: float32, bfloat16 or float16.")]
AttentionOption = Annotated[
    str | None,
    typer.Option("--attn-implementation", help="Attention of the target: sdpa, eager, flash_attention_2, ..."),
]
CompileOption = Annotated[
    bool, typer.Option("--compile", help="Compile the passes with torch.compile; on CUDA as CUDA graphs.")
]
SubsetOption = Annotated[str | None, typer.Option("--subset", help="Configuration of a Hub data set.")]
SplitOption = Annotated[str, typer.Option("--split", help="Split of a Hub data set.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the target's repository.")]
TemplateOption = Annotated[
    str | None, typer.Option("--chat-template", help="A file, or 'vicuna'; default: the tokenizer's template.")
]
TemplateOptionsOption = Annotated[
    list[str] | None, typer.Option("--template-option", help="Variable key=value of the chat template; repeatable.")
]
ImagesOption = Annotated[
    str | None, typer.Option("--images", help="Folder of the images that prompts name; default: that of the prompts.")
]
TemperaturesOption = Annotated[
    list[float] | None, typer.Option("--temperature", help="Temperature; repeatable; default: 0 and 1.")
]
BatchSizesOption = Annotated[
    list[int] | None, typer.Option("--batch-size", help="Prompts decoded together; repeatable; default: 1.")
]
PromptsOption = Annotated[
    str, typer.Option("--prompts", help="Prompts: 'embedded' or a file.", callback=checked_prompts)
]
MeasuredOption = Annotated[list[str], typer.Option("--drafter", help="As for `draftsmith eval`; repeatable.")]
CountOption = Annotated[int | None, typer.Option("--count", help="Most prompts to use.")]
DRAFTER_HELP = (
    "Drafter: a folder or Hub id, optionally with @revision, or without training: prompt-lookup, suffix, "
    "early-exit:layers=N, native-mtp, hybrid:drafter=FOLDER."
)
POLICY_HELP = (
    "Draft policy: chain, confidence, adaptive, tree, sampled-tree, best-first or optimal-tree, with settings as in "
    "best-first:size=16,depth=8."
)
RuleOption = Annotated[str | None, typer.Option("--rule", help="Verification rule; default: the best lossless one.")]
TopKOption = Annotated[int | None, typer.Option("--top-k", help="Sample from the k most likely tokens.")]
TopPOption = Annotated[float | None, typer.Option("--top-p", help="Sample from the smallest set of probability p.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of sampling.")]


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON, instead of tables.")]


def print_json(value: Any) -> None:
    """Print `value` as JSON for other programs, in ASCII: no text in it reaches a terminal as control characters."""
    typer.echo(json.dumps(value, indent=2))


def suggest(*words: object, to_stderr: bool = False) -> None:
    """Print the command that usually follows, from the words of its command line."""
    typer.echo(printable(f"next: {shlex.join(map(str, words))}"), err=to_stderr)


def measuring(target: str, drafters: Iterable[str], prompts: str) -> list[str]:
    """Return the options that `eval`, `check` and `forecast` share, as words of a command line."""
    chosen = [word for drafter in drafters for word in ("--drafter", drafter)]
    return ["--target", target, *chosen, *(["--prompts", prompts] if prompts != "embedded" else [])]


def checked_recipe(name: str, overrides: list[str] | None) -> "Recipe":
    """Return a recipe whose target exists, if it is a local one."""
    from draftsmith.train.recipe import load_recipe

    recipe = load_recipe(name, overrides)
    check_target_name(recipe.target.model)
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
            check_drafter_name(folder)
        named[name] = os.path.expanduser(folder)
    return named


def template_options(entries: list[str] | None) -> dict[str, Any]:
    """Return `key=value` entries, such as `enable_thinking=false`, as a dict of YAML values."""
    return dict(parse_assignment(f"--template-option {entry}", entry) for entry in entries or [])
