"""The commands of `draftsmith data`. Packages are imported inside each command, so that `--help` stays fast."""

import json
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.cli.options import CONTINUES, checked_recipe, interruptible, suggest, with_settings
from draftsmith.distill.data_section import SELF, Prompts, SourceSection
from draftsmith.errors import ConfigError
from draftsmith.reading import assignment
from draftsmith.train.data_settings import Preview, Regeneration

data_app = typer.Typer(
    help="Preview samples, sample responses from a target, prepare a recipe's data.", no_args_is_help=True
)


@data_app.command(name="preview")
@with_settings
def data_preview(settings: Preview) -> None:
    """Show samples with their trained tokens highlighted, and the distribution of lengths."""
    from draftsmith.distill.sources import has_answers
    from draftsmith.train.data_commands import preview

    def response(source: SourceSection) -> str:
        given = source.response or settings.response
        if source.prompts == SELF:
            if given == "text":
                raise ConfigError(f"prompts={SELF} with response=text; expected target: only the prompts are written")
            return "target"
        return given or ("text" if has_answers(source.prompts, source.subset, source.split) else "target")

    data = settings.data
    if isinstance(data.prompts, str):
        one = SourceSection(prompts=data.prompts, subset=data.subset, split=data.split)
        data = data.model_copy(update={"response": response(one)})
    else:
        sources = [source.model_copy(update={"response": response(source)}) for source in data.prompts]
        data = data.model_copy(update={"prompts": sources})
    preview(settings.model_copy(update={"data": data}))
    named = {"subset": data.subset, "split": data.split, "chat_template": data.chat_template}
    named = {key: value for key, value in named.items() if value not in (None, "train")}
    _suggest_recipe(settings.target.model, data.prompts, data.response, named)


@data_app.command(name="regenerate")
@with_settings
def data_regenerate(settings: Regeneration) -> None:
    """Sample the target's response to every prompt; an interrupted command continues when it is run again."""
    from draftsmith.train.data_commands import regenerate

    with interruptible(lambda: CONTINUES):
        regenerate(settings)
    template = settings.data.chat_template
    given = {} if template is None else {"chat_template": template}
    _suggest_recipe(settings.target.model, settings.out, "text", given)


def _suggest_recipe(target: str, prompts: Prompts | Path, response: str, data: dict[str, str]) -> None:
    """Print the command that says what training a draft model on the prompts needs."""
    keys = {"target.model": target, "data.response": response, **{f"data.{key}": value for key, value in data.items()}}
    words = [assignment(key, value) for key, value in keys.items()]
    if isinstance(prompts, list):
        listed = [source.model_dump(exclude_defaults=True) for source in prompts]
        words.insert(1, f"data.prompts={json.dumps(listed)}")
    else:
        words.insert(1, assignment("data.prompts", str(prompts)))
    suggest("draftsmith", "memory", "draft_model/any_prompts", *words, to_stderr=True)


@data_app.command(name="server")
def data_server(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe with teacher.kind=server.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, which override the file.")] = None,
) -> None:
    """Print the command that starts the engine whose hidden states a recipe trains on."""
    checked = checked_recipe(recipe, overrides, read_prompts=False)
    from draftsmith.train.data_commands import engine_command_of

    typer.echo(engine_command_of(checked))
    suggest("draftsmith", "train", recipe, *overrides or (), to_stderr=True)


@data_app.command(name="prepare")
def data_prepare(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, which override the file.")] = None,
) -> None:
    """Sample a recipe's responses and build its teacher cache without training."""
    from draftsmith.train.process import launch_variables

    launch_variables()  # before torch is loaded
    checked = checked_recipe(recipe, overrides)
    from draftsmith.train.data_commands import prepare

    with interruptible(lambda: CONTINUES):
        prepare(checked)
    suggest("accelerate", "launch", "-m", "draftsmith.train", recipe, *overrides or (), to_stderr=True)
