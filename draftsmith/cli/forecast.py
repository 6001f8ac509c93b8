"""`draftsmith forecast`: predicted acceptance and speedup."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import (
    AttentionOption,
    BatchSizesOption,
    CountOption,
    DtypeOption,
    JsonOption,
    MeasuredOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperaturesOption,
    TemplateOption,
    TemplateOptionsOption,
    TopKOption,
    TopPOption,
    TrustOption,
    at_least_one,
    checked_drafters,
    checked_policy,
    checked_rule,
    measuring,
    print_json,
    suggest,
    template_options,
)
from draftsmith.errors import ConfigError


def forecast(
    target: TargetOption,
    drafter: MeasuredOption,
    prompts: PromptsOption = "embedded",
    temperature: TemperaturesOption = None,
    max_draft_length: Annotated[
        int, typer.Option("--max-draft-length", help="Longest chain of draft tokens to compare.", callback=at_least_one)
    ] = 8,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="Other policy to compare; repeatable; default: a few trees.", callback=checked_policy
        ),
    ] = None,
    rule: Annotated[
        str | None, typer.Option("--rule", help="Verification rule of chains; default: block.", callback=checked_rule)
    ] = None,
    batch_size: BatchSizesOption = None,
    count: CountOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Most new tokens per prompt.", callback=at_least_one)
    ] = 96,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
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
    seed: SeedOption = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    dtype: DtypeOption = "float32",
    attn_implementation: AttentionOption = None,
    trust_remote_code: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder for forecast.json.")] = Path("runs/forecast"),
    as_json: JsonOption = False,
) -> None:
    """Predict acceptance, tau, speedup and the best policy of drafters without decoding with them."""
    drafters = checked_drafters(drafter)  # before torch is imported
    from draftsmith.eval.forecast.forecast import PLAIN, ForecastSettings
    from draftsmith.eval.forecast.run import ForecastFiles, run, show
    from draftsmith.eval.forecast.served import ServedRequest

    settings = ForecastSettings(
        target=target,
        drafters=drafters,
        prompts=prompts,
        temperatures=tuple(temperature or (0.0, 1.0)),
        max_draft_length=max_draft_length,
        policies=tuple(policy or ()),
        rule=rule,
        batch_sizes=tuple(batch_size or (1,)),
        count=count,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
        dtype=dtype,
        attn_implementation=attn_implementation,
    )
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
        pair = measuring(settings.target, [settings.drafters[best["drafter"]]], settings.prompts, settings)
        suggest("draftsmith", "eval", *pair, *chosen)
