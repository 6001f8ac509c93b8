"""From names to a report: what `draftsmith eval` and the quickstart share."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.decode.kv_cache import config_limit
from draftsmith.distill.load_target import EMBEDDED, load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.eval.diagnostics import diagnose
from draftsmith.eval.evaluation import Evaluation, evaluate
from draftsmith.eval.journal import JOURNAL, KEPT
from draftsmith.eval.prompts import check_prompts, load_prompts
from draftsmith.eval.report import check_report_folder, summary_table, write_report
from draftsmith.eval.settings import Settings, require_valid
from draftsmith.eval.stages import stage
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.locks import hold_folder
from draftsmith.safe_text import Terminal
from draftsmith.storage import writing

MOST_REPEATS = 1000
"""Each decodes every text again."""


@dataclass(frozen=True)
class MeasureRequest(Settings):
    """The measurement's settings and whether the target may bring code of its own."""

    trust_remote_code: bool = False

    @property
    def settings(self) -> Settings:
        values = {key: value for key, value in vars(self).items() if key != "trust_remote_code"}
        return Settings(**values)


def measure(request: MeasureRequest, out: Path, *, title: str, runs: dict[str, list[dict]]) -> Evaluation:
    """Check everything that can be checked cheaply, then load, measure and write the report to `out`.

    What an earlier call of the same request has measured into `out` is not measured again. `runs` holds the metrics of
    the run that trained a drafter, by the drafter's name, for the plot of its training.
    """
    _check(request, out)
    with hold_folder("out", out):
        check_report_folder(out, request.settings)
        return _measure(request, out, title, runs)


def _measure(request: MeasureRequest, out: Path, title: str, runs: dict[str, list[dict]]) -> Evaluation:
    where = {"subset": request.subset, "split": request.split, "count": request.count}
    where |= {"chat_template": request.chat_template, "template_options": request.template_options}
    trust = {"trust_remote_code": request.trust_remote_code}
    tokenizer, config = load_tokenizer(request.target, **trust)
    load_prompts(request.prompts, tokenizer, context=config_limit(config), **where)  # refused before weights are read
    with stage("loading the target and the drafters", shown=request.target != EMBEDDED):  # that has a bar of its own
        loaded = load_target(request.target, dtype=request.dtype, **trust)
        drafters = {name: load_drafter(path, loaded.model, loaded.tokenizer) for name, path in request.drafters.items()}
    limits = [config_limit(config), *(drafter.context_limit for drafter in drafters.values())]
    shortest = min((limit for limit in limits if limit is not None), default=None)
    prompts = load_prompts(request.prompts, loaded.tokenizer, context=shortest, **where)
    options = {"tokenizer": loaded.tokenizer, "journal": out / JOURNAL, "diagnose": diagnose}
    evaluation = evaluate(loaded.model, drafters, prompts, request.settings, **options)
    with stage("drawing and writing the report"), writing(out, KEPT):
        write_report(evaluation, out, title=title, runs=runs)
    return evaluation


def _check(request: MeasureRequest, out: Path) -> None:
    several = {"gamma": request.draft_lengths, "batch_size": request.batch_sizes}
    counts = {"count": [request.count], "max_new_tokens": [request.max_new_tokens], "repeats": [request.repeats]}
    require_valid(request, {**several, **counts}, {**several, "policy": request.policies}, out)
    if request.repeats > MOST_REPEATS:
        raise ConfigError.of("repeats", request.repeats, f"at most {MOST_REPEATS}")
    check_prompts(request.prompts, request.subset, request.split)


def show(evaluation: Evaluation, out: Path) -> None:
    """The table, the guards, the notes and where the files are."""
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(summary_table(evaluation))
    for guard in evaluation.guards:
        console.print(f"WRONG ({guard['guard']}): {guard['message']}", style="bold red")
    for note in evaluation.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.html'} and report.md beside it")
