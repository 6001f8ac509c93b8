"""`draftsmith eval` and the quickstart: validate, load, measure, and write the report."""

from pathlib import Path

from draftsmith.errors import ConfigError
from draftsmith.eval.diagnostics import diagnose
from draftsmith.eval.evaluation import Evaluation, evaluate
from draftsmith.eval.journal import JOURNAL, KEPT
from draftsmith.eval.prompts import PromptRows
from draftsmith.eval.report import check_report_folder, summary_table, write_report
from draftsmith.eval.session import load_session
from draftsmith.eval.settings import Settings, require_valid
from draftsmith.eval.stages import stage
from draftsmith.locks import hold_folder
from draftsmith.safe_text import Terminal
from draftsmith.storage import writing

MOST_REPEATS = 1000
"""Every repeat decodes all texts again."""


def measure(
    settings: Settings,
    out: Path,
    *,
    title: str,
    runs: dict[str, list[dict]],
    trust_remote_code: bool = False,
) -> Evaluation:
    """Validate the settings, load the models, measure, and write the report to `out`.

    Results that an earlier call with the same settings left in `out` are used again. `runs` holds, by drafter, the
    metrics of the run that trained it, for the plot of its training.
    """
    rows = _validated(settings, out)
    with hold_folder("out", out):
        check_report_folder(out, settings)
        session = load_session(settings, rows, trust_remote_code=trust_remote_code)
        evaluation = evaluate(
            session.target,
            session.drafters,
            session.prompts,
            settings,
            tokenizer=session.tokenizer,
            processor=session.processor,
            journal=out / JOURNAL,
            diagnose=diagnose,
        )
        with stage("drawing and writing the report"), writing(out, KEPT):
            write_report(evaluation, out, title=title, runs=runs)
        return evaluation


def _validated(settings: Settings, out: Path) -> PromptRows:
    """Return the rows of the prompts; ConfigError for settings that cannot be measured."""
    if not settings.drafters:
        raise ConfigError("drafter is missing; expected at least one")
    several = {"gamma": settings.draft_lengths, "batch_size": settings.batch_sizes}
    counts = {"count": [settings.count], "max_new_tokens": [settings.max_new_tokens], "repeats": [settings.repeats]}
    require_valid(settings, counts={**several, **counts}, unique={**several, "policy": settings.policies}, out=out)
    if settings.repeats > MOST_REPEATS:
        raise ConfigError.of("repeats", settings.repeats, f"at most {MOST_REPEATS}")
    return PromptRows.read(settings.prompts, settings.subset, settings.split, settings.images)


def show(evaluation: Evaluation, out: Path) -> None:
    """Print the table, the guards, the notes and the place of the report."""
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(summary_table(evaluation))
    for guard in evaluation.guards:
        console.print(f"WRONG ({guard['guard']}): {guard['message']}", style="bold red")
    for note in evaluation.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.html'} and report.md beside it")
