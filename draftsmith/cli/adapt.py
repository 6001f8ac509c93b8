"""`draftsmith adapt`: continue training a drafter on what its target serves."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.options import TrustOption, measuring, suggest
from draftsmith.errors import ConfigError
from draftsmith.safe_text import printable

LEARNING, WATCH = "With --live or --watch", "With --watch"
BOTH = ("every", "temperature", "seed", "dtype")
MODES = {
    "watch": (*BOTH, "format", "keep", "delete-read", "max-minutes", "idle-minutes"),
    "live": (*BOTH, "max-new-tokens"),
    "": ("answer-again",),
}
"""Options beside --target, --out and --trust-remote-code that each mode has."""


def adapt(
    drafter: Annotated[
        str, typer.Argument(help="A folder written by `draftsmith train`; --live and --watch: any drafter.")
    ],
    prompts: Annotated[
        str | None,
        typer.Argument(help="Served prompts and responses: a file (JSONL, JSON, Parquet); --live: prompts, or '-'."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value; overrides the recipe.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="Target; default: the one it was trained for.")] = None,
    again: Annotated[bool, typer.Option("--answer-again", help="Generate new responses with the target.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the result; default: runs/adapted, runs/live or runs/watched."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Answer the prompts on stdout, and learn while they are decoded.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", help="Most tokens of an answer; 128.", rich_help_panel="With --live"),
    ] = None,
    watch: Annotated[
        Path | None,
        typer.Option("--watch", help="Learn from hidden states that an engine writes into this folder, until Ctrl-C."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", help="Layout of an engine for each version: vllm, …", rich_help_panel=WATCH),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            help="Tokens for each optimizer step; --live: a tenth of the time, --watch: 128.",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="--live: of the answers, 0; --watch: at which acceptance is compared, 1.",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", help="Newest versions that are kept; 4.", rich_help_panel=WATCH)
    ] = None,
    delete_read: Annotated[
        bool, typer.Option("--delete-read", help="Delete files that were read.", rich_help_panel=WATCH)
    ] = False,
    max_minutes: Annotated[
        float | None, typer.Option("--max-minutes", help="End after this time.", rich_help_panel=WATCH)
    ] = None,
    idle_minutes: Annotated[
        float | None,
        typer.Option("--idle-minutes", help="End if no file comes for this time.", rich_help_panel=WATCH),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed; 0.", rich_help_panel=LEARNING)] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of the target; float32.", rich_help_panel=LEARNING)
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Continue training a drafter on what its target serves; keep the result only if it is better."""
    given = {"answer-again": again or None, "delete-read": delete_read or None, "format": format, "keep": keep}
    given |= {"every": every, "temperature": temperature, "seed": seed, "dtype": dtype}
    given |= {"max-minutes": max_minutes, "idle-minutes": idle_minutes, "max-new-tokens": max_new_tokens}
    given = {key: value for key, value in given.items() if value is not None}
    if live and watch is not None:
        raise ConfigError("--live with --watch; expected one of the two")
    mode = "live" if live else "" if watch is None else "watch"
    _require_mode(mode, given)
    options = {key.replace("-", "_"): value for key, value in given.items()}
    if watch is not None:
        if prompts is not None:
            raise ConfigError(f"--watch with {prompts!r}; expected one of the two: a folder of states, or prompts")
        common = {"target": target, "trust_remote_code": trust_remote_code}
        return _watch(drafter, watch, out or Path("runs/watched"), {**options, **common})
    if prompts is None:
        raise ConfigError("prompts are missing; expected a file, or --watch with a folder of hidden states")
    if live:
        if overrides:
            raise ConfigError(f"--live with {overrides[0]!r}; expected no keys of a recipe")
        return _live(drafter, prompts, target, out or Path("runs/live"), trust_remote_code, options)
    if trust_remote_code:
        raise ConfigError("--trust-remote-code without --live or --watch; expected target.trust_remote_code=true")
    _train(drafter, prompts, out or Path("runs/adapted"), target, again, overrides or [])


def _require_mode(mode: str, given: dict[str, Any]) -> None:
    """Raise ConfigError for an option of another mode."""
    for key in given:
        if key not in MODES[mode]:
            others = " or ".join(f"--{name}" for name, keys in MODES.items() if name and key in keys)
            how = f"with --{mode}; it has no such option" if mode else f"without {others}; expected both"
            raise ConfigError(f"--{key} {how}")


def _train(drafter: str, prompts: str, out: Path, target: str | None, again: bool, overrides: list[str]) -> None:
    """Train as a recipe does; the training loop prints the next command."""
    from draftsmith.train.recipe import adapted_recipe

    checked = adapted_recipe(drafter, prompts, str(out), target=target, answered=not again, overrides=overrides)
    from draftsmith.train.trainer import train as run

    typer.echo(printable(f"drafter: {run(checked)}"))


def _live(
    drafter: str, prompts: str, target: str | None, out: Path, trust_remote_code: bool, options: dict[str, Any]
) -> None:
    """Answer prompts, and save the drafter that learns from the answers."""
    from draftsmith.cli.live import LiveRequest, serve, target_of

    name, temperature = target_of(drafter, target), options.pop("temperature", 0.0)
    pair = {"target": name, "drafters": {"live": drafter}, "prompts": prompts, "temperatures": (temperature,)}
    saved = serve(LiveRequest(**pair, out=out, **options), trust_remote_code=trust_remote_code)
    following = measuring(name, [saved], "embedded" if prompts == "-" else prompts)
    suggest("draftsmith", "eval", *following, to_stderr=True)


def _watch(drafter: str, folder: Path, out: Path, options: dict[str, Any]) -> None:
    """Learn from the files of a folder until something ends it."""
    from draftsmith.train.online.exported import DRAFTER, WatchRequest
    from draftsmith.train.online.exported import watch as run
    from draftsmith.train.online.versions import LATEST

    request = WatchRequest(drafter, folder, out, delete=options.pop("delete_read", False), **options)
    target = run(request, lambda line: typer.echo(printable(line)))
    suggest("draftsmith", "eval", *measuring(target, [str(out / LATEST / DRAFTER)], "embedded"))
