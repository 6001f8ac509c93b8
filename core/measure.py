"""From names to a report: what `draftsmith eval` and the quickstart share."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from draftsmith.decode.cache import context_limit
from draftsmith.decode.policies import check_policy
from draftsmith.decode.processors import Sampling
from draftsmith.decode.verify import rule_named
from draftsmith.distill.targets import DTYPES, check_target_name, load_target
from draftsmith.errors import ConfigError
from draftsmith.eval.harness import Evaluation, Settings, evaluate
from draftsmith.eval.prompts import check_prompts, load_prompts
from draftsmith.eval.report import check_report_folder, summary_table, write_report
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.named import is_named, parse_named
from draftsmith.train.output import read_metrics


@dataclass(frozen=True)
class MeasureRequest(Settings):
    """The measurement's settings and whether the target may bring code of its own."""

    trust_remote_code: bool = False

    @property
    def settings(self) -> Settings:
        values = {key: value for key, value in vars(self).items() if key != "trust_remote_code"}
        return Settings(**values)


def measure(request: MeasureRequest, out: Path, *, title: str) -> Evaluation:
    """Check everything that can be checked cheaply, then load, measure and write the report to `out`."""
    _check(request, out)
    loaded = load_target(request.target, dtype=request.dtype, trust_remote_code=request.trust_remote_code)
    limit = context_limit(loaded.model)
    prompts = load_prompts(request.prompts, loaded.tokenizer, count=request.count, context=limit)
    drafters = {name: load_drafter(path, loaded.model, loaded.tokenizer) for name, path in request.drafters.items()}
    evaluation = evaluate(loaded.model, drafters, prompts, request.settings)
    runs = {name: read_metrics(Path(path).parent) for name, path in request.drafters.items() if not is_named(path)}
    write_report(evaluation, out, title=title, runs={name: metrics for name, metrics in runs.items() if metrics})
    return evaluation


def _check(request: MeasureRequest, out: Path) -> None:
    if not request.drafters:
        raise ConfigError("drafter is missing; expected at least one")
    for temperature in request.temperatures:
        Sampling(temperature, request.top_k, request.top_p)
    positive = {"gamma": request.draft_length, "count": request.count}
    positive |= {"max_new_tokens": request.max_new_tokens, "repeats": request.repeats}
    for key, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError.of(key, value, ">= 1")
    if request.draft_length is not None and request.policies:
        raise ConfigError(f"gamma={request.draft_length} and policy={request.policies[0]}; expected one of the two")
    for policy in request.policies:
        check_policy(policy)
    if request.rule is not None:
        rule_named(request.rule)
    for drafter in request.drafters.values():
        if is_named(drafter):
            parse_named(drafter)
    if len(set(request.temperatures)) < len(request.temperatures):
        raise ConfigError.of("temperature", list(request.temperatures), "each only once")
    if request.dtype not in DTYPES:
        raise ConfigError.of("dtype", request.dtype, f"one of {', '.join(DTYPES)}")
    check_report_folder(out, request.settings)
    check_prompts(request.prompts)
    check_target_name(request.target)


def show(evaluation: Evaluation, out: Path) -> None:
    """The table, the notes and where the files are."""
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    console.print(summary_table(evaluation))
    for note in evaluation.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"report: {out / 'report.md'}", markup=False)
