"""`draftsmith check`: a test of losslessness on this machine, with an exit code."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.options import (
    LOADED,
    TEMPLATE,
    at_least_one,
    checked_drafters,
    measuring,
    print_json,
    settings_of,
    suggest,
    taking,
)
from draftsmith.errors import ConfigError
from draftsmith.reading import read_json

if TYPE_CHECKING:
    from draftsmith.eval.lossless.check import Check, CheckSettings
    from draftsmith.eval.prompts import PromptRows

    Keep = Callable[[Check], None]

EXIT_CODES = {"lossless": 0, "lossy": 1, "inconclusive": 3}
"""By verdict; 2 is bad input, as in every command."""
LEAST_TOKENS = 500
NOT_SERVED = {"draft_length": "gamma", "policies": "policy"}
NOT_SERVED |= {name: name for name in ("rule", "images", "compile", "invariant")}
"""Options of decoding on this machine."""


@taking(
    *("target", "drafters", "prompts", "draft_length", "policies", "temperatures", "rule", "top_k", "top_p", "seed"),
    *(*TEMPLATE, *LOADED, "compile", "invariant", "images", "as_json"),
    count=12,
    dtype=None,
    out=None,
)
def check(
    target: str,
    drafters: list[str] | None,
    server: Annotated[
        str | None, typer.Option("--server", help="Address of a running server with speculation; without --drafter.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The server's name of the target; default: the only one it lists.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Address of a server without speculation, instead of loading the target."),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", help="Tokens to sample; as many for the control.", callback=at_least_one)
    ] = 10_000,
    *,
    out: Path | None,
    as_json: bool,
    trust_remote_code: bool,
    **given: Any,
) -> None:
    """Test that decoding with drafters, or a server, is lossless. Exit code 0: lossless, 1: lossy, 3: inconclusive."""
    if tokens < LEAST_TOKENS:  # before torch is imported
        raise ConfigError.of("tokens", tokens, f">= {LEAST_TOKENS}")
    named = _drafters(drafters, server, model, baseline)
    if server is not None and (used := [option for name, option in NOT_SERVED.items() if given[name]]):
        raise ConfigError(f"--{used[0]} with --server; expected it at the server's start")
    if server is not None:
        from draftsmith.distill.server.client import served_at

        served_at([server, *([] if baseline is None else [baseline])], model)
    from draftsmith.eval.lossless.check import CheckSettings

    given["dtype"] = given["dtype"] or ("float32" if server is None else "bfloat16")
    settings = settings_of(CheckSettings, given, target=target, drafters=named, tokens=tokens, baseline=baseline)
    rows = _validated(settings)

    def checking(keep: "Keep") -> "Check":
        from draftsmith.eval.lossless.check import check
        from draftsmith.eval.settings import load_session

        if server is not None:
            from draftsmith.eval.lossless.served import check_server

            return check_server(settings, rows, out, model=model, trust_remote_code=trust_remote_code, keep=keep)
        session = load_session(settings, rows, trust_remote_code=trust_remote_code)
        return check(session.target, session.drafters, session.prompts, settings, notes=session.notes, keep=keep)

    from draftsmith.storage import hold_folder

    with nullcontext() if out is None else hold_folder("out", out):
        if out is not None:
            _require_folder(settings, out)
        checked = _run(checking, out, as_json)
    if checked.verdict == "lossless" and not as_json and drafters:
        suggest("draftsmith", *measuring("eval", settings, drafters))
    raise typer.Exit(EXIT_CODES[checked.verdict])


def _drafters(drafter: list[str] | None, server: str | None, model: str | None, baseline: str | None) -> dict[str, str]:
    """Return the drafters, or the server's address, by name; ConfigError unless one of the two is given."""
    if server is None:
        if given := model or baseline:
            raise ConfigError(f"--model or --baseline={given} without --server; expected both with it only")
        if not drafter:
            raise ConfigError("--drafter is missing; expected a drafter, or a running server as --server")
        return checked_drafters(drafter)
    if drafter:
        raise ConfigError(f"--drafter={drafter[0]} with --server={server}; expected one of the two")
    from draftsmith.distill.data_section import require_address

    for key, address in {"server": server, "baseline": baseline}.items():
        if address is not None:
            require_address(key, address)
    return {model or "server": server}


def _validated(settings: "CheckSettings") -> "PromptRows":
    """Return the rows of the prompts; ConfigError for settings that cannot be checked."""
    from draftsmith.eval.prompts import PromptRows
    from draftsmith.eval.settings import require_valid

    require_valid(settings, counts={"gamma": [settings.draft_length], "count": [settings.count]})
    if settings.draft_length is not None and settings.policies:
        raise ConfigError(f"gamma={settings.draft_length} and policy={settings.policies[0]}; expected one of the two")
    return PromptRows.read(settings.prompts, images=settings.images)


def _require_folder(settings: "CheckSettings", out: Path) -> None:
    """Raise ConfigError if `out` holds the results of a check with other settings."""
    from draftsmith.eval.settings import require_same_settings

    file = out / "check.json"
    if not file.exists():
        return
    try:
        before = dict(read_json(file)["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"out={out} holds a check.json that is not ours; expected another folder") from error
    require_same_settings(before, settings, out, "check")


def _run(checking: "Callable[[Keep], Check]", out: Path | None, as_json: bool) -> "Check":
    """Check and print; the results so far are written to `out` after each drafter and temperature."""
    from draftsmith.eval.lossless.check import report
    from draftsmith.storage import write_json, write_text, writing

    def keep(so_far: "Check") -> None:
        if out is None:
            return
        with writing(out / "check.json", "free some space and repeat the command"):
            write_json(out / "check.json", so_far.as_json())
            write_text(out / "check.md", report(so_far))

    checked = checking(keep)
    if as_json:
        print_json(checked.as_json())
    else:
        _show(checked, out)
    return checked


def _show(checked: "Check", out: Path | None) -> None:
    from draftsmith.eval.lossless.check import sampling_table, sentences
    from draftsmith.terminal import Terminal

    console = Terminal(width=None if Terminal().is_terminal else 110)
    for arm in checked.arms:
        if arm.sampling is not None:
            console.print(sampling_table(arm, arm.sampling))
    for sentence in sentences(checked):
        console.print(sentence)
    if out is not None:
        console.print(f"evidence: {out / 'check.md'}")
