"""Options that several commands have in common."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.errors import ConfigError
from draftsmith.reading import parse_assignment, specified_name

TARGET_HELP = "'embedded', a local folder or a Hub id."
TargetOption = Annotated[str, typer.Option("--target", help=TARGET_HELP)]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
SubsetOption = Annotated[str | None, typer.Option("--subset", help="Configuration of a Hub data set.")]
SplitOption = Annotated[str, typer.Option("--split", help="Of a Hub data set.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the target's repository carries.")
]
TemplateOption = Annotated[
    str | None, typer.Option("--chat-template", help="A file, or 'vicuna', instead of the tokenizer's.")
]
TemplateOptionsOption = Annotated[
    list[str] | None, typer.Option("--template-option", help="key=value for the chat template; repeatable.")
]
DRAFTER_HELP = (
    "Folder or Hub id, with @revision or without; or untrained: prompt-lookup, suffix, early-exit:layers=N, "
    "hybrid:drafter=FOLDER."
)
POLICY_HELP = (
    "How drafts grow: chain, confidence, adaptive, tree, measured-tree, sampled-tree, dynamic-tree, best-first or "
    "optimal-tree, with settings as in best-first:size=16,depth=8."
)
RuleOption = Annotated[str | None, typer.Option("--rule", help="Verification rule; by default the best lossless one.")]


def named_drafters(drafters: list[str]) -> dict[str, str]:
    """`name=folder` or `folder` (named after its last parts) as a dict; two of one name are refused."""
    from draftsmith.heads.checkpoint import is_named

    named: dict[str, str] = {}
    for entry in drafters:
        name, equals, folder = entry.partition("=")
        # suffix:min_match=3 is a drafter with a setting, runs/lr=0.1/drafter a folder: neither has a name for it.
        if not equals or ":" in name or Path(entry).is_dir():
            parts = [part for part in Path(entry).parts if part not in ("drafter", "/")]
            name, folder = (specified_name(entry) if is_named(entry) else parts[-1] if parts else entry), entry
        if name in named:
            raise ConfigError(f"drafter={entry}: the name {name!r} is taken; expected name=folder with another name")
        named[name] = folder
    return named


def template_options(entries: list[str] | None) -> dict[str, Any]:
    """`enable_thinking=false` and its like as a dict."""
    return dict(parse_assignment(f"--template-option {entry}", entry) for entry in entries or [])
