"""`draftsmith forecast`: predicted acceptance and speedup."""

from pathlib import Path
from typing import Annotated, Any

import typer

from draftsmith.cli.options import (
    LOADED,
    REQUIRED,
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


@taking(
    *("target", "prompts", "count", "policies", "batch_sizes", "max_new_tokens", "temperatures", "rule", "top_k"),
    *("top_p", "seed", *TEMPLATE, *LOADED, "as_json"),
    drafters=REQUIRED,
    out=Path("runs/forecast"),
)
def forecast(
    drafters: list[str],
    out: Path,
    as_json: bool,
    trust_remote_code: bool,
    max_draft_length: Annotated[
        int, typer.Option("--max-draft-length", help="Longest chain of draft tokens to compare.", callback=at_least_one)
    ] = 8,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Timings of another machine, see docs/guide/forecast.md.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option("--save-profile", help="File for this machine's timings, for --profile.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", help="Time running servers: one without a drafter, and one for each draft length."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="The name under which the servers have it.")] = None,
    context: Annotated[
        int | None, typer.Option("--context", help="With --server: tokens of each prompt; default: as they are.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="With --server: JSON file for vLLM's and SGLang's settings.")
    ] = None,
    **given: Any,
) -> None:
    """Predict acceptance, tau, speedup and the best policy of drafters without decoding with them."""
    named = checked_drafters(drafters)  # before torch is imported
    from draftsmith.eval.forecast.forecast import PLAIN, ForecastSettings
    from draftsmith.eval.forecast.run import ForecastFiles, run, show
    from draftsmith.eval.forecast.served import ServedRequest

    settings = settings_of(ForecastSettings, given, drafters=named, max_draft_length=max_draft_length)
    served = ServedRequest(tuple(server), model, context, write) if server else None
    if served is None and (model, context, write) != (None, None, None):
        raise ConfigError("--model, --context and --write without --server; expected the addresses of servers")
    files = ForecastFiles(profile, save_profile, served)
    predicted = run(settings, out, files, trust_remote_code=trust_remote_code)
    if as_json:
        return print_json(predicted.as_json())
    show(predicted, out)
    best = predicted.best[0]
    if best["drafter"] is not None and best["policy"] is not None:
        chosen = [] if best["policy"] == PLAIN else ["--policy", best["policy"]]
        suggest("draftsmith", *measuring("eval", settings, [settings.drafters[best["drafter"]]]), *chosen)
