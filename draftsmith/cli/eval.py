"""`draftsmith eval`, `eval server`, `eval compare` and `draftsmith forecast`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import (
    AGAIN,
    CONTINUES,
    Json,
    Out,
    Overwrite,
    interruptible,
    measuring,
    print_json,
    suggest,
    template_words,
    with_settings,
)
from draftsmith.errors import ConfigError
from draftsmith.eval.settings import ForecastSettings, ServedSettings, Settings, named_drafters
from draftsmith.names import EMBEDDED

eval_app = typer.Typer(
    help="Measure drafters against the target alone (eval --target T --drafter D), or compare two measurements."
)


@eval_app.callback(invoke_without_command=True)
@partial(with_settings, group=True)
def evaluate(
    settings: Settings, out: Out = Path("runs/eval"), overwrite: Overwrite = False, as_json: Json = False
) -> None:
    """Measure acceptance and wall-clock speedup of drafters against the target alone."""
    from draftsmith.eval.evaluation import measure, show
    from draftsmith.eval.journal import kept
    from draftsmith.train.run_folder import metrics_of

    title, runs = f"Drafters for {settings.target}", metrics_of(settings.drafters)
    with interruptible(lambda: f"{kept(out)}, and the same command continues"):
        evaluation = measure(settings, out, title=title, runs=runs, overwrite=overwrite)
    if as_json:
        return print_json(evaluation.as_json())
    show(evaluation, out)
    suggest("draftsmith", *measuring("forecast", settings))
    if trained := [folder for folder in settings.drafters.values() if Path(folder).is_dir()]:
        suggest("draftsmith", "push", trained[0], "USER/NAME", "--eval", out)


@eval_app.command(name="server")
@with_settings
def serve(
    settings: ServedSettings, out: Out = Path("runs/eval-server"), overwrite: Overwrite = False, as_json: Json = False
) -> None:
    """Measure a drafter where it serves: tokens/s by number of requests; tau and acceptance from the engine."""
    from draftsmith.distill.server.client import served_at

    served_at(settings.addresses, settings.model)  # before torch is imported
    from draftsmith.eval.server.served_evaluation import measure_server, server_table
    from draftsmith.terminal import Terminal

    with interruptible(lambda: CONTINUES):
        result = measure_server(settings, out, overwrite=overwrite)
    if as_json:
        return print_json(result.as_json())
    console = Terminal.for_tables()
    console.print(server_table(result))
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.md'}")
    if settings.baseline is None:
        served = ["--target", settings.target, "--model", settings.model]
        served += ["--prompts", settings.prompts] if settings.prompts != EMBEDDED else []
        served += template_words(settings)
        beside = ["--baseline", "URL_WITHOUT_DRAFTER", "--out", f"{out}-beside"]
        suggest("draftsmith", "eval", "server", settings.url, *served, *beside)


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
    console = Terminal.for_tables()
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


@with_settings
def forecast(settings: ForecastSettings, out: Out = Path("runs/forecast"), as_json: Json = False) -> None:
    """Predict acceptance, tau, speedup and the best policy of drafters without decoding with them."""
    from draftsmith.eval.forecast.command import run, show
    from draftsmith.eval.forecast.forecast import PLAIN

    with interruptible(lambda: AGAIN):
        predicted = run(settings, out)
    if as_json:
        return print_json(predicted.as_json())
    show(predicted, out)
    best = predicted.best[0]
    # Where nothing pays, `eval` of the first drafter says why.
    name, policy = best["drafter"] or next(iter(settings.drafters)), best["policy"]
    chosen = [] if policy in (None, PLAIN) else ["--policy", policy]
    settings = settings.model_copy(update={"drafters": named_drafters(settings.drafters[name])})
    suggest("draftsmith", *measuring("eval", settings), *chosen)
