"""`draftsmith eval`, `eval server`, `eval compare` and `draftsmith forecast`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    template_words,
)
from draftsmith.errors import ConfigError
from draftsmith.names import EMBEDDED

if TYPE_CHECKING:
    from draftsmith.eval.settings import Settings

eval_app = typer.Typer(
    help="Measure drafters against the target alone (eval --target T --drafter D), or compare two measurements."
)
TEXTS = ("prompts", "subset", "split", "count", "max_new_tokens", "repeats", "temperatures", "top_p", "seed", *TEMPLATE)
"""Options of measurements on this machine and on a server."""


@eval_app.callback(invoke_without_command=True)
@taking(
    *("drafters", *TEXTS, "policies", "batch_sizes", "rule", "top_k", *LOADED, "compile", "invariant", "images"),
    target=None,
    out=Path("runs/eval"),
    as_json=False,
)
def evaluate(
    context: typer.Context,
    target: str | None,
    drafters: list[str] | None,
    out: Path,
    as_json: bool,
    trust_remote_code: bool,
    draft_lengths: Annotated[
        list[int] | None,
        typer.Option(
            "--gamma", help="Draft length of a chain; repeatable; default: each drafter's own.", callback=at_least_one
        ),
    ] = None,
    **given: Any,
) -> None:
    """Measure acceptance and wall-clock speedup of drafters against the target alone."""
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise ConfigError("--target is missing; expected 'embedded', a local folder or a Hub id")
    if not drafters:
        raise ConfigError("--drafter is missing; expected at least one")
    named = checked_drafters(drafters)  # before torch is imported
    from draftsmith.eval.settings import Settings

    settings = settings_of(Settings, given, target=target, drafters=named, draft_lengths=draft_lengths)
    _measure(settings, drafters, out, as_json=as_json, trust_remote_code=trust_remote_code)


def _measure(settings: "Settings", drafters: list[str], out: Path, *, as_json: bool, trust_remote_code: bool) -> None:
    """Measure, and print the results and what may follow."""
    from draftsmith.eval.evaluation import measure, show
    from draftsmith.eval.journal import kept
    from draftsmith.train.run_folder import metrics_of

    title, runs = f"Drafters for {settings.target}", metrics_of(settings.drafters)
    try:
        evaluation = measure(settings, out, title=title, runs=runs, trust_remote_code=trust_remote_code)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"interrupted; {kept(out)}, and the same command continues") from stop
    if as_json:
        return print_json(evaluation.as_json())
    show(evaluation, out)
    suggest("draftsmith", *measuring("forecast", settings, drafters))
    if trained := [folder for folder in settings.drafters.values() if Path(folder).is_dir()]:
        suggest("draftsmith", "push", trained[0], "USER/NAME", "--eval", out)


@eval_app.command(name="server")
@taking("target", *TEXTS, "trust_remote_code", "as_json", out=Path("runs/eval-server"))
def serve(
    address: Annotated[str, typer.Argument(metavar="URL", help="Address of the server with the drafter.")],
    target: str,
    out: Path,
    as_json: bool,
    trust_remote_code: bool,
    model: Annotated[str, typer.Option("--model", help="The name under which the server has the target.")],
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="Address of a server without a drafter, or an eval.json measured on one."),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency", help="Requests at a time; repeatable; default: 1, 2 and 4.", callback=at_least_one
        ),
    ] = None,
    **given: Any,
) -> None:
    """Measure a drafter where it serves: tokens/s by number of requests; tau and acceptance from the engine."""
    from draftsmith.distill.data_section import is_address, server_section
    from draftsmith.distill.server.client import served_at

    section = server_section(url=address, model=model, top_p=given["top_p"])
    served_at(
        [address, *([baseline] if baseline is not None and is_address(baseline) else [])], model
    )  # before torch is imported
    from draftsmith.eval.server.run import measure_server, server_table
    from draftsmith.eval.settings import Settings
    from draftsmith.terminal import Terminal

    served = {"drafters": {model: address}, "batch_sizes": concurrency or (1, 2, 4)}
    settings = settings_of(Settings, given, target=target, **served)
    result = measure_server(section, settings, out, baseline=baseline, trust_remote_code=trust_remote_code)
    if as_json:
        return print_json(result.as_json())
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(server_table(result))
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.md'}")
    served = ["--target", target, "--model", model]
    served += ["--prompts", settings.prompts] if settings.prompts != EMBEDDED else []
    served += template_words(settings)
    if baseline is None:
        beside = ["--baseline", "URL_WITHOUT_DRAFTER", "--out", f"{out}-beside"]
        return suggest("draftsmith", "eval", "server", address, *served, *beside)
    alone = "URL_WITHOUT_DRAFTER" if Path(baseline).exists() else baseline
    suggest("draftsmith", "forecast", *served, "--drafter", "FOLDER", "--server", alone, "--server", address)


@eval_app.command(name="compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A folder written by `draftsmith eval`, or an eval.json.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another one; default: compare the drafters and policies in A.")
    ] = None,
) -> None:
    """Compare drafters prompt by prompt, with 95 % intervals of the ratio of their speeds."""
    for folder in (first, second):
        if folder is not None and not folder.exists():  # before torch is imported
            raise ConfigError(f"{folder}; expected an eval.json or the folder of one, and there is none")
    from draftsmith.eval.compare import compare_evaluations, comparison_table
    from draftsmith.eval.prompts import OVERALL
    from draftsmith.eval.results import read_evaluation
    from draftsmith.metrics import few_units
    from draftsmith.terminal import Terminal

    read = [(folder, read_evaluation(folder)) for folder in (first, second) if folder is not None]
    comparisons = compare_evaluations(*(content for _, content in read))
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(comparison_table(comparisons))
    for comparison in comparisons:
        console.print(comparison.sentence)
    for note in few_units(comparison.units for comparison in comparisons):
        console.print(f"note: {note}")
    measured = [(row, folder, one) for folder, one in read for row in one["rows"] if row["category"] == OVERALL]
    if measured:  # a server's measurement has other rows
        row, folder, evaluation = max(measured, key=lambda entry: entry[0]["speedup"])
        drafter = evaluation["settings"]["drafters"][row["drafter"]]
        if Path(drafter).is_dir():
            suggest("draftsmith", "push", drafter, "USER/NAME", "--eval", folder, "--as", row["drafter"])


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
    named = checked_drafters(drafters)  # before torch is imported, as the servers are asked
    if server and model is not None:
        from draftsmith.distill.server.client import served_at

        served_at(server, model)
    from draftsmith.eval.forecast.forecast import PLAIN, ForecastSettings
    from draftsmith.eval.forecast.run import run, show
    from draftsmith.eval.forecast.served import ServedRequest

    settings = settings_of(ForecastSettings, given, drafters=named, max_draft_length=max_draft_length)
    served = ServedRequest(tuple(server), model, context, write) if server else None
    if served is None and (model, context, write) != (None, None, None):
        raise ConfigError("--model, --context and --write without --server; expected the addresses of servers")
    timings = (profile, save_profile, served)
    predicted = run(settings, out, *timings, trust_remote_code=trust_remote_code)
    if as_json:
        return print_json(predicted.as_json())
    show(predicted, out)
    best = predicted.best[0]
    # Where nothing pays, `eval` of the first drafter says why.
    name, policy = best["drafter"] or next(iter(settings.drafters)), best["policy"]
    chosen = [] if policy in (None, PLAIN) else ["--policy", policy]
    suggest("draftsmith", *measuring("eval", settings, [settings.drafters[name]]), *chosen)
