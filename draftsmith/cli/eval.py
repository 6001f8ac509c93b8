"""`draftsmith eval …` on the command line: a measurement, or a comparison of two."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import (
    DRAFTER_HELP,
    POLICY_HELP,
    TARGET_HELP,
    DtypeOption,
    RuleOption,
    SplitOption,
    SubsetOption,
    TemplateOption,
    TemplateOptionsOption,
    TrustOption,
    named_drafters,
    template_options,
)
from draftsmith.errors import ConfigError

eval_app = typer.Typer(
    help="Measure drafters against the target alone: eval --target T --drafter D; or compare two measurements."
)


@eval_app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    target: Annotated[str | None, typer.Option("--target", help=TARGET_HELP)] = None,
    drafter: Annotated[
        list[str] | None, typer.Option("--drafter", help=DRAFTER_HELP + " Or name=any of these; repeatable.")
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", help="'embedded', JSONL or its like, a Hub data set.")
    ] = "embedded",
    subset: SubsetOption = None,
    split: SplitOption = "train",
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="Repeatable; 0 and 1.")] = None,
    gamma: Annotated[
        list[int] | None,
        typer.Option("--gamma", help="Chains of this length; repeatable. By default each drafter's own."),
    ] = None,
    policy: Annotated[list[str] | None, typer.Option("--policy", help=POLICY_HELP + " Repeatable.")] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", help="Prompts decoded together; repeatable; 1.")
    ] = None,
    rule: RuleOption = None,
    count: Annotated[int | None, typer.Option("--count", help="At most this many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens a turn.")] = 96,
    top_k: Annotated[int | None, typer.Option("--top-k")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Times that everything is measured.")] = 3,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of the report; the same command goes on in it.")] = Path(
        "runs/eval"
    ),
) -> None:
    """Measure acceptance and wall-clock speedup of drafters against the target alone."""
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise ConfigError("--target is missing; expected 'embedded', a local folder or a Hub id")
    if not drafter:
        raise ConfigError("--drafter is missing; expected at least one")
    from draftsmith.eval.run import measure, show
    from draftsmith.eval.settings import Settings
    from draftsmith.train.run_folder import metrics_of

    settings = Settings(
        target=target,
        drafters=named_drafters(drafter),
        prompts=prompts,
        subset=subset,
        split=split,
        temperatures=tuple(temperature or (0.0, 1.0)),
        draft_lengths=tuple(gamma or ()),
        policies=tuple(policy or ()),
        batch_sizes=tuple(batch_size or (1,)),
        rule=rule,
        count=count,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        repeats=repeats,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
        dtype=dtype,
    )
    title, runs = f"Drafters for {target}", metrics_of(settings.drafters)
    show(measure(settings, out, title=title, runs=runs, trust_remote_code=trust_remote_code), out)


@eval_app.command(name="compare")
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A folder that `draftsmith eval` wrote, or an eval.json.")],
    second: Annotated[
        Path | None, typer.Argument(metavar="B", help="Another one; without it, the arms of A among each other.")
    ] = None,
) -> None:
    """Say which drafter is better, and whether the difference is real: paired by prompt, with intervals."""
    from draftsmith.eval.compare import compare_evaluations, verdict_table
    from draftsmith.eval.evaluation import read_evaluation
    from draftsmith.safe_text import Terminal

    verdicts = compare_evaluations(read_evaluation(first), read_evaluation(second) if second is not None else None)
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(verdict_table(verdicts))
    for verdict in verdicts:
        console.print(verdict.sentence)
