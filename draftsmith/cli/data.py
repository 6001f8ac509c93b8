"""The commands of `draftsmith data`. Packages are imported inside each command, so that `--help` stays fast."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import (
    DtypeOption,
    SplitOption,
    SubsetOption,
    TargetOption,
    TemplateOption,
    TemplateOptionsOption,
    TrustOption,
    template_options,
)
from draftsmith.errors import ConfigError

data_app = typer.Typer(
    help="Preview samples, sample responses from a target, prepare a recipe's data.", no_args_is_help=True
)
SourceArgument = Annotated[
    str, typer.Argument(help="A file or folder (JSONL, JSON, Parquet, text), or a Hub data set.")
]
PromptTokensOption = Annotated[int, typer.Option("--prompt-tokens", help="Longer prompts are left out and counted.")]
ResponseTokensOption = Annotated[int, typer.Option("--response-tokens", help="The longest response.")]


@data_app.command(name="preview")
def data_preview(
    source: SourceArgument,
    target: TargetOption,
    response: Annotated[str, typer.Option("--response", help="'text' or 'target' (only prompts).")] = "text",
    show: Annotated[int, typer.Option("--show", help="Samples to print.")] = 3,
    count: Annotated[int, typer.Option("--count", help="Samples to read for the statistics.")] = 10_000,
    prompt_tokens: PromptTokensOption = 2048,
    response_tokens: ResponseTokensOption = 8192,
    subset: SubsetOption = None,
    split: SplitOption = "train",
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Show samples with their trained tokens highlighted, and the distribution of lengths."""
    if response not in ("text", "target"):
        raise ConfigError.of("--response", response, "'text' or 'target'")
    from draftsmith.train.prepare import DataRequest, preview

    request = DataRequest(
        source=source,
        target=target,
        count=count,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        subset=subset,
        split=split,
        chat_template=chat_template,
        template_options=template_options(template_option),
        trust_remote_code=trust_remote_code,
    )
    preview(request, answered=response == "text", show=show)


@data_app.command(name="regenerate")
def data_regenerate(
    source: SourceArgument,
    target: TargetOption,
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help="Speeds up sampling losslessly.")] = None,
    turns: Annotated[str, typer.Option("--turns", help="Turns to answer: 'first' or 'all'.")] = "first",
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 1.0,
    responses: Annotated[int, typer.Option("--responses", min=1, help="Responses to each prompt.")] = 1,
    count: Annotated[int, typer.Option("--count", help="Largest number of prompts.")] = 1_000_000,
    prompt_tokens: PromptTokensOption = 2048,
    response_tokens: ResponseTokensOption = 1024,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")] = 64,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    subset: SubsetOption = None,
    split: SplitOption = "train",
    chat_template: TemplateOption = None,
    template_option: TemplateOptionsOption = None,
    dtype: DtypeOption = "float32",
    trust_remote_code: TrustOption = False,
) -> None:
    """Sample the target's response to every prompt; an interrupted command continues when it is run again."""
    if turns not in ("first", "all"):
        raise ConfigError.of("--turns", turns, "'first' or 'all'")
    if responses > 1 and temperature == 0:
        raise ConfigError(f"--responses {responses} with --temperature 0, which gives the same text again; expected 1")
    from draftsmith.distill.regeneration import SampleSettings
    from draftsmith.train.prepare import DataRequest, regenerate

    request = DataRequest(
        source=source,
        target=target,
        count=count,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        every_turn=turns == "all",
        subset=subset,
        split=split,
        chat_template=chat_template,
        template_options=template_options(template_option),
        trust_remote_code=trust_remote_code,
    )
    settings = SampleSettings(response_tokens, temperature, batch_size, seed, responses=responses)
    regenerate(request, settings, out, drafter=drafter, dtype=dtype)


@data_app.command(name="prepare")
def data_prepare(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, which override the file.")] = None,
) -> None:
    """Sample a recipe's responses and build its teacher cache without training."""
    from draftsmith.train.recipe import load_recipe

    checked = load_recipe(recipe, overrides)
    from draftsmith.train.prepare import prepare

    prepare(checked)
