"""`draftsmith forecast` on the command line. Rooms are imported inside the command, as in cli.py."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import (
    DtypeOption,
    TargetOption,
    TemplateOption,
    TemplateOptionsOption,
    TrustOption,
    named_drafters,
    template_options,
)


def forecast(
    target: TargetOption,
    drafter: Annotated[
        list[str], typer.Option("--drafter", help="As for `draftsmith eval`, or name=any of these; repeatable.")
    ],
    prompts: Annotated[str, typer.Option("--prompts", help="'embedded' or a JSONL file.")] = "embedded",
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="Repeatable; 0 and 1.")] = None,
    max_draft_length: Annotated[
        int, typer.Option("--max-draft-length", help="Chains of 1 to so many draft tokens are compared.")
    ] = 8,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Other policies to compare with, by name; repeatable.")
    ] = None,
    rule: Annotated[str | None, typer.Option("--rule", help="Of drawn chains; by default the block rule.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", help="Repeatable; 1.")] = None,
    count: Annotated[int | None, typer.Option("--count", help="At most this many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens a prompt.")] = 96,
    top_k: Annotated[int | None, typer.Option("--top-k")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p")] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Seconds of another machine; see docs/forecast.md.")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option("--save-profile", help="Write this machine's seconds, as --profile reads them.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also decode with each drafter's best policy.")] = False,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", help="Folder of forecast.json.")] = Path("runs/forecast"),
) -> None:
    """Predict acceptance, tau and speedup of drafters, and the best policy, without decoding with them."""
    from draftsmith.eval.forecast.forecast import ForecastSettings
    from draftsmith.eval.forecast.run import ForecastFiles, run, show

    settings = ForecastSettings(
        target=target,
        drafters=named_drafters(drafter),
        prompts=prompts,
        count=count,
        temperatures=tuple(temperature or (0.0, 1.0)),
        max_draft_length=max_draft_length,
        policies=tuple(policy or ()),
        batch_sizes=tuple(batch_size or (1,)),
        max_new_tokens=max_new_tokens,
        rule=rule,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        chat_template=chat_template,
        template_options=template_options(template_option),
        dtype=dtype,
    )
    files = ForecastFiles(profile, save_profile)
    show(run(settings, out, files, measures=measure, trust_remote_code=trust_remote_code), out)
