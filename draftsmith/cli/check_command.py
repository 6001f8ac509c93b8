"""`draftsmith check`: a test of losslessness on this machine, with an exit code."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.options import (
    AGAIN,
    OUT,
    Json,
    Overwrite,
    interruptible,
    measuring,
    print_json,
    suggest,
    with_settings,
)
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import ANOTHER, CheckSettings, require_same_run
from draftsmith.reading import read_json
from draftsmith.terminal import printable

if TYPE_CHECKING:
    from draftsmith.eval.lossless.check import Check

    Keep = Callable[[Check], None]

EXIT_CODES = {"lossless": 0, "lossy": 1, "inconclusive": 3}
"""By verdict; 2 is bad input, as in every command."""

WRITTEN = ("check.json", "answers.jsonl", "answers-baseline.jsonl")
"""Files of `out` from which a check continues."""


@with_settings
def check(
    settings: CheckSettings,
    out: Annotated[Path | None, OUT] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Test that decoding with drafters, or a server, is lossless. Exit code 0: lossless, 1: lossy, 3: inconclusive."""
    if settings.server is not None:  # before torch is imported
        from draftsmith.distill.server.client import served_at

        served_at([settings.server, *filter(None, [settings.baseline])], settings.model)
    from draftsmith.eval.prompts import PromptRows
    from draftsmith.storage import hold_folder

    rows = PromptRows.read(settings.prompts, images=settings.images)

    before: dict[str, Any] = {}

    def resume(new: "Check") -> "Check":
        checked = new if out is None or not before else new.continued(before, out)
        if checked.arms:
            arms = "; ".join(f"{arm.drafter} ({arm.policy}) at T={arm.temperature:g}" for arm in checked.arms)
            typer.echo(printable(f"kept from an earlier start: {arms}"), err=True)
        return checked

    def checking(keep: "Keep") -> "Check":
        from draftsmith.eval.lossless.check import check
        from draftsmith.eval.session import load_session

        if settings.server is not None:
            from draftsmith.eval.lossless.served_check import check_server

            return check_server(settings, rows, out, keep=keep)
        session = load_session(settings, rows, now=_time_of(before))
        pair = session.target, session.drafters, session.prompts
        return check(*pair, settings, notes=session.notes, resume=resume, keep=keep)

    with nullcontext() if out is None else hold_folder("out", out, discard=WRITTEN if overwrite else ()):
        if out is not None:
            before |= _stored(settings, out)
        with interruptible(lambda: _stopped(out)):
            checked = _run(checking, out, as_json)
    if checked.verdict == "lossless" and not as_json and settings.server is None:
        suggest("draftsmith", *measuring("eval", settings))
    raise typer.Exit(EXIT_CODES[checked.verdict])


def _stopped(out: Path | None) -> str:
    """Return what an interrupted check leaves."""
    file = None if out is None else out / "check.json"
    if file is None or not file.exists():
        return AGAIN
    return f"what is finished is in {file}, and the same command continues"


def _stored(settings: CheckSettings, out: Path) -> dict[str, Any]:
    """Return the results in `out`, empty for none; ConfigError for those of a check with other settings."""
    file = out / "check.json"
    if not file.exists():
        return {}
    try:
        before = read_json(file)
        dict(before["settings"])
        _time_of(before)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"out={out} holds a check.json that is not ours; expected {ANOTHER}") from error
    require_same_run(before, settings, out, what="check")
    return before


def _time_of(stored: dict[str, Any]) -> datetime | None:
    """Return the time that the prompts of a check show; None where they show none."""
    now = stored.get("fingerprints", {}).get("now")
    return None if now is None else datetime.fromisoformat(now)


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

    console = Terminal.for_tables()
    for arm in checked.arms:
        if arm.sampling is not None and arm.sampling.failure is None:
            console.print(sampling_table(arm, arm.sampling))
    for sentence in sentences(checked):
        console.print(sentence)
    if out is not None:
        console.print(f"evidence: {out / 'check.md'}")
