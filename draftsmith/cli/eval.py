"""`draftsmith eval` and `draftsmith eval compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftsmith.cli.options import (
    DRAFTER_HELP,
    POLICY_HELP,
    TARGET_HELP,
    AttentionOption,
    BatchSizesOption,
    CompileOption,
    CountOption,
    DtypeOption,
    ImagesOption,
    InvariantOption,
    JsonOption,
    RuleOption,
    SeedOption,
    SplitOption,
    SubsetOption,
    TemperaturesOption,
    TemplateOption,
    TemplateOptionsOption,
    TopKOption,
    TopPOption,
    TrustOption,
    at_least_one,
    checked_drafters,
    checked_policy,
    checked_prompts,
    checked_target,
    measuring,
    print_json,
    suggest,
    template_options,
)
from draftsmith.errors import ConfigError

if TYPE_CHECKING:
    from draftsmith.eval.settings import Settings

eval_app = typer.Typer(
    help="Measure drafters against the target alone (eval --target T --drafter D), or compare two measurements."
)
DraftersOption = Annotated[
    list[str] | None, typer.Option("--drafter", help=DRAFTER_HELP + " Or name=DRAFTER; repeatable.")
]
PromptsOption = Annotated[
    str,
    typer.Option(
        "--prompts",
        help="Prompts: 'embedded', a file (JSONL, JSON, Parquet) or a Hub data set.",
        callback=checked_prompts,
    ),
]
DraftLengthsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--gamma", help="Draft length of a chain; repeatable; default: each drafter's own.", callback=at_least_one
    ),
]
PoliciesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", help=POLICY_HELP + " Repeatable; NAME=POLICY is for one drafter.", callback=checked_policy
    ),
]
OutOption = Annotated[Path, typer.Option("--out", help="Folder for the report; the same command continues a run.")]


@eval_app.callback(invoke_without_command=True)
def evaluate(
    context: typer.Context,
    target: Annotated[str | None, typer.Option("--target", help=TARGET_HELP, callback=checked_target)] = None,
    drafter: DraftersOption = None,
    prompts: PromptsOption = "embedded",
    subset: SubsetOption = None,
    split: SplitOption = "train",
    temperature: TemperaturesOption = None,
    gamma: DraftLengthsOption = None,
    policy: PoliciesOption = None,
    batch_size: BatchSizesOption = None,
    rule: RuleOption = None,
    count: CountOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Most new tokens per turn.", callback=at_least_one)
    ] = 96,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Times that every text is decoded.", callback=at_least_one)
    ] = 3,
    seed: SeedOption = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    images: ImagesOption = None,
    dtype: DtypeOption = "float32",
    attn_implementation: AttentionOption = None,
    compile: CompileOption = False,
    invariant: InvariantOption = False,
    trust_remote_code: TrustOption = False,
    out: OutOption = Path("runs/eval"),
    as_json: JsonOption = False,
) -> None:
    """Measure acceptance and wall-clock speedup of drafters against the target alone."""
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise ConfigError("--target is missing; expected 'embedded', a local folder or a Hub id")
    if not drafter:
        raise ConfigError("--drafter is missing; expected at least one")
    drafters = checked_drafters(drafter)  # before torch is imported
    from draftsmith.eval.settings import Settings

    settings = Settings(
        target=target,
        drafters=drafters,
        prompts=prompts,
        subset=subset,
        split=split,
        count=count,
        temperatures=tuple(temperature or (0.0, 1.0)),
        draft_lengths=tuple(gamma or ()),
        policies=tuple(policy or ()),
        batch_sizes=tuple(batch_size or (1,)),
        rule=rule,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        repeats=repeats,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
        images=images,
        dtype=dtype,
        attn_implementation=attn_implementation,
        compile=compile,
        invariant=invariant,
    )
    _measure(settings, drafter, out, as_json=as_json, trust_remote_code=trust_remote_code)


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
    suggest("draftsmith", "forecast", *measuring(settings.target, drafters, settings.prompts, settings))
    if trained := [folder for folder in settings.drafters.values() if Path(folder).is_dir()]:
        suggest("draftsmith", "push", trained[0], "USER/NAME", "--eval", out)


@eval_app.command(name="server")
def serve(
    address: Annotated[str, typer.Argument(metavar="URL", help="Address of the server with the drafter.")],
    target: Annotated[
        str, typer.Option("--target", help=TARGET_HELP + " Only its tokenizer is loaded.", callback=checked_target)
    ],
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
    prompts: PromptsOption = "embedded",
    subset: SubsetOption = None,
    split: SplitOption = "train",
    temperature: TemperaturesOption = None,
    count: CountOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Most new tokens per turn.", callback=at_least_one)
    ] = 96,
    top_p: TopPOption = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Times that every text is asked for.", callback=at_least_one)
    ] = 3,
    seed: SeedOption = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    trust_remote_code: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", help="A folder without an eval.json, for the report.")] = Path(
        "runs/eval-server"
    ),
    as_json: JsonOption = False,
) -> None:
    """Measure a drafter where it serves: tokens/s by number of requests; tau and acceptance from the engine."""
    from draftsmith.distill.server.settings import server_section
    from draftsmith.eval.server.run import measure_server, server_table
    from draftsmith.eval.settings import Settings
    from draftsmith.safe_text import Terminal

    section = server_section(url=address, model=model, top_p=top_p)
    settings = Settings(
        target=target,
        drafters={model: address},
        prompts=prompts,
        subset=subset,
        split=split,
        count=count,
        temperatures=tuple(temperature or (0.0, 1.0)),
        batch_sizes=tuple(concurrency or (1, 2, 4)),
        max_new_tokens=max_new_tokens,
        top_p=top_p,
        repeats=repeats,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
    )
    result = measure_server(section, settings, out, baseline=baseline, trust_remote_code=trust_remote_code)
    if as_json:
        return print_json(result.as_json())
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(server_table(result))
    for note in result.notes:
        console.print(f"note: {note}")
    console.print(f"report: {out / 'report.md'}")
    served = ["--target", target, "--model", model]
    if baseline is None:
        return suggest("draftsmith", "eval", "server", address, *served, "--baseline", "URL_WITHOUT_DRAFTER")
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
    from draftsmith.eval.results import frozen_rows, read_evaluation
    from draftsmith.metrics import few_units
    from draftsmith.safe_text import Terminal

    read = [(folder, read_evaluation(folder)) for folder in (first, second) if folder is not None]
    comparisons = compare_evaluations(*(content for _, content in read))
    console = Terminal(width=None if Terminal().is_terminal else 110)
    console.print(comparison_table(comparisons))
    for comparison in comparisons:
        console.print(comparison.sentence)
    for note in few_units(comparison.units for comparison in comparisons):
        console.print(f"note: {note}")
    measured = [(row, folder, one) for folder, one in read for row in frozen_rows(one) if row["category"] == OVERALL]
    if measured:  # a server's measurement has other rows
        row, folder, evaluation = max(measured, key=lambda entry: entry[0]["speedup"])
        drafter = evaluation["settings"]["drafters"][row["drafter"]]
        if Path(drafter).is_dir():
            suggest("draftsmith", "push", drafter, "USER/NAME", "--eval", folder, "--as", row["drafter"])
