"""The commands of `draftsmith data`. Packages are imported inside each command, so that `--help` stays fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftsmith.cli.options import (
    LOADED,
    TEMPLATE,
    checked_prompts,
    checked_recipe,
    suggest,
    taking,
    template_options,
)
from draftsmith.errors import ConfigError
from draftsmith.reading import assignment, parse_json

if TYPE_CHECKING:
    from draftsmith.distill.data_section import DataSection, ServerSection

data_app = typer.Typer(
    help="Preview samples, sample responses from a target, prepare a recipe's data.", no_args_is_help=True
)
PromptsArgument = Annotated[
    str,
    typer.Argument(help="A file or folder (JSONL, JSON, Parquet, text), or a Hub data set.", callback=checked_prompts),
]
PromptTokensOption = Annotated[int, typer.Option("--prompt-tokens", help="Longer prompts are left out and counted.")]
ResponseTokensOption = Annotated[int, typer.Option("--response-tokens", "--max-tokens", help="The longest response.")]


@data_app.command(name="preview")
@taking("target", "subset", "split", *TEMPLATE, "trust_remote_code", count=10_000)
def data_preview(
    prompts: PromptsArgument,
    target: str,
    trust_remote_code: bool,
    response: Annotated[
        str | None,
        typer.Option("--response", help="'text' (the file's) or 'target' (only prompts); default: by the first row."),
    ] = None,
    show: Annotated[int, typer.Option("--show", help="Samples to print.")] = 3,
    prompt_tokens: PromptTokensOption = 2048,
    response_tokens: ResponseTokensOption = 8192,
    **given: Any,
) -> None:
    """Show samples with their trained tokens highlighted, and the distribution of lengths."""
    tokens = {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens}
    data = _section(given, prompts=prompts, response=response, **tokens)
    if response is None:
        from draftsmith.distill.sources import has_answers

        response = "text" if has_answers(prompts, data.subset, data.split) else "target"
        data = data.model_copy(update={"response": response})
    from draftsmith.train.prepare import preview

    preview(target, data, show=show, trust_remote_code=trust_remote_code)
    named = {key: given[key] for key in ("subset", "split", "chat_template") if given[key] not in (None, "train")}
    _suggest_recipe(target, prompts, response, named)


@data_app.command(name="regenerate")
@taking("target", "subset", "split", "top_p", "seed", *TEMPLATE, *LOADED, count=1_000_000)
def data_regenerate(
    prompts: PromptsArgument,
    target: str,
    seed: int,
    dtype: str,
    attn_implementation: str | None,
    trust_remote_code: bool,
    out: Annotated[Path, typer.Option("--out", help="JSONL file to write.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help="Speeds up sampling losslessly.")] = None,
    turns: Annotated[str, typer.Option("--turns", help="Turns to answer: 'first' or 'all'.")] = "first",
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 1.0,
    responses: Annotated[int, typer.Option("--responses", min=1, help="Responses to each prompt.")] = 1,
    prompt_tokens: PromptTokensOption = 2048,
    response_tokens: ResponseTokensOption = 1024,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts decoded together.")] = 64,
    server: Annotated[
        str | None,
        typer.Option("--server", help="Address of a server that speaks OpenAI's API and answers instead."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The name under which the server has the target.")
    ] = None,
    route: Annotated[
        str | None, typer.Option("--route", help="'chat', 'completion' or 'auto': chat for conversations.")
    ] = None,
    thinking: Annotated[
        str | None, typer.Option("--thinking", help="'keep' or 'drop' what the server returns as reasoning_content.")
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option("--extra-body", help="JSON object with further fields of every request, such as top_k."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests to the server at a time; default: 64.")
    ] = None,
    timeout_seconds: Annotated[
        float | None, typer.Option("--timeout", help="Seconds for one answer; default: 600.")
    ] = None,
    failures: Annotated[
        int | None, typer.Option("--failures", help="Conversations that may fail after all retries; default: 20.")
    ] = None,
    **given: Any,
) -> None:
    """Sample the target's response to every prompt; an interrupted command continues when it is run again."""
    options = {"model": model, "route": route, "top_p": given.pop("top_p"), "thinking": thinking}
    options |= {"concurrency": concurrency, "timeout": timeout_seconds, "failures": failures}
    asked = _server(server, drafter, options | {"extra-body": extra_body})
    if responses > 1 and temperature == 0:
        raise ConfigError(f"--responses {responses} with --temperature 0, which gives the same text again; expected 1")
    sampled = {"turns": turns, "responses": responses, "temperature": temperature, "batch_size": batch_size}
    sampled |= {"prompt_tokens": prompt_tokens, "response_tokens": response_tokens, "server": asked}
    data = _section(given, prompts=prompts, **sampled)
    from draftsmith.train.prepare import regenerate
    from draftsmith.train.recipe_sections import TargetSection

    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    section = TargetSection(model=target, trust_remote_code=trust_remote_code, **options)
    regenerate(section, data, out, seed=seed, drafter=drafter)
    _suggest_recipe(target, out, "text", {} if data.chat_template is None else {"chat_template": data.chat_template})


def _section(given: dict[str, Any], **own: Any) -> "DataSection":
    """Return the recipe's section `data` that a command's options describe."""
    from draftsmith.config import section_of
    from draftsmith.distill.data_section import DataSection

    values = {**given, "template_options": template_options(given["template_options"]), **own}
    return section_of(DataSection, lambda name: f"--{name.replace('_', '-')}", **values)


def _suggest_recipe(target: str, prompts: str | Path, response: str, data: dict[str, str]) -> None:
    """Print the command that says what training a draft model on the prompts needs."""
    keys = {"target.model": target, "data.prompts": prompts, "data.response": response}
    keys |= {f"data.{key}": value for key, value in data.items()}
    words = [assignment(key, str(value)) for key, value in keys.items()]
    suggest("draftsmith", "memory", "draft_model/any_prompts", *words, to_stderr=True)


def _server(address: str | None, drafter: str | None, options: dict[str, Any]) -> "ServerSection | None":
    """Return the section that `--server` and its options describe; ConfigError for options that do not fit."""
    if address is None:
        given = next((name for name, value in options.items() if value is not None), None)
        if given is not None:
            raise ConfigError(f"--{given.replace('_', '-')} without --server; expected the address of a server")
        return None
    if drafter is not None:
        raise ConfigError(f"--drafter {drafter} with --server; expected one of the two")
    if options["model"] is None:
        raise ConfigError("--model is missing; expected the name under which the server has the target")
    from draftsmith.distill.data_section import server_section

    extra, timeout = _json_object(options.pop("extra-body")), options.pop("timeout")
    return server_section(url=address, **options, extra_body=extra, timeout_seconds=timeout)


def _json_object(text: str | None) -> Any:
    try:
        return None if text is None else parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f'--extra-body={text} is not JSON ({error}); expected an object such as {{"top_k": 20}}'
        ) from error


@data_app.command(name="prepare")
def data_prepare(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, which override the file.")] = None,
) -> None:
    """Sample a recipe's responses and build its teacher cache without training."""
    from draftsmith.train.launch_variables import launch_variables

    launch_variables()  # before torch is loaded
    checked = checked_recipe(recipe, overrides)
    from draftsmith.train.prepare import prepare

    prepare(checked)
    suggest("accelerate", "launch", "-m", "draftsmith.train", recipe, *overrides or (), to_stderr=True)
