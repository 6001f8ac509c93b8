"""The commands `export`, `import` and `push`. Packages are imported inside each, so that `--help` stays fast."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, Self

import typer
from pydantic import ValidationInfo, model_validator

from draftsmith.cli.options import suggest, with_settings
from draftsmith.config import Count, Section, user_name
from draftsmith.errors import ConfigError, DraftsmithError
from draftsmith.eval.settings import Dtype, check_drafters, require_cached_drafters
from draftsmith.heads.configs import require_weights
from draftsmith.names import (
    GGUF,
    check_licence,
    check_prompts_name,
    check_repo,
    check_target_name,
    check_template_name,
    require_cached_prompts,
    require_cached_without_hub,
)
from draftsmith.option_fields import Option, option_fields
from draftsmith.storage import require_empty
from draftsmith.terminal import printable


def _check_checkpoint(folder: Path, key: str) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{key}={folder}; expected a folder with config.json, and there is none")


def _check_drafter(name: str, key: str) -> None:
    check_drafters(name, key)
    require_weights(name, key)


REPOSITORY = Option(check=lambda name, key: check_repo(key, name))


class Conversion(Section):
    """A drafter that is written for its target in another format."""

    drafter: Annotated[str, Option(argument=True, check=_check_drafter, hub=require_cached_drafters)]
    """Folder or Hub id of a drafter, or native-mtp."""
    target: Annotated[str, Option(check=check_target_name, hub=require_cached_without_hub)]
    """'embedded', a local folder, a GGUF file or a Hub id."""
    trust_remote_code: bool = False
    """Run code from the target's repository."""
    out: Annotated[Path, Option(check=lambda folder, key: require_empty(key, folder))]
    """A new folder."""
    revision: str | None = None
    """Revision of the target on the Hub."""


def _check_exported(name: str, key: str) -> None:
    if not (name.endswith(GGUF) and Path(name).expanduser().is_file()):
        _check_drafter(name, key)


class Export(Conversion):
    drafter: Annotated[str, Option(argument=True, check=_check_exported, hub=require_cached_drafters)]
    """Folder or Hub id of a drafter, native-mtp, or a GGUF file, which is written without quantization."""
    format: Literal["vllm", "sglang", "gguf", "transformers", "native"]
    """vllm, sglang, gguf, transformers or native."""
    dtype: Dtype | None = None
    """float32, bfloat16 or float16; by default the stored one."""


class Import(Conversion):
    draft_length: Annotated[Count | None, Option("--gamma")] = None
    """Draft length to store; by default the published one, or 3."""
    self_test: Annotated[bool, Option("--self-test/--no-self-test")] = True
    """Compare alpha with that of the nearest conventions, on a few sequences of the target."""
    prompts: Annotated[str | None, Option(check=check_prompts_name, hub=require_cached_prompts)] = None
    """Prompts of the self-test: a file or a Hub data set, of which 32 are used; by default 8 short ones."""

    chat_template: Annotated[str | None, Option(check=check_template_name)] = None
    """Of the self-test: a file, 'vicuna', or 'plain' (texts joined by line breaks); default: the tokenizer's."""

    @model_validator(mode="after")
    def _check_self_test(self, info: ValidationInfo) -> Self:
        for key in ("prompts", "chat_template"):
            if (value := getattr(self, key)) is not None and not self.self_test:
                raise ConfigError(f"{user_name(info, key)}={value} with --no-self-test; expected one of the two")
        return self


@with_settings
def export(settings: Export) -> None:
    """Write a drafter in the format of vLLM, SGLang, llama.cpp or transformers."""
    from draftsmith.hub.export import export_to, show_export

    exported, target = export_to(**settings.model_dump()), settings.target
    show_export(exported)
    if exported.alone:
        return None
    if (port := exported.serving.port) is None:
        return suggest("draftsmith", "eval", "--target", target, "--drafter", settings.out)
    served = ["--target", target, "--model", exported.serving.model]
    suggest("draftsmith", "eval", "server", f"http://localhost:{port}", *served)


@with_settings
def import_(settings: Import) -> None:
    """Read a published drafter, check that it fits the target, and save it in draftsmith's format."""
    from draftsmith.hub.export import import_from

    read, lines = import_from(**settings.model_dump())
    count = sum(parameter.numel() for parameter in read.parameters())
    about = f"a drafter of type {read.type}, {count:,} parameters, draft length {read.draft_length_hint}"
    for line in (f"{settings.out}: {about}", *lines):
        typer.echo(printable(line))
    for command in ("eval", "check"):
        suggest("draftsmith", command, "--target", settings.target, "--drafter", settings.out)


class Push(Section):
    """A drafter, its repository, and the details of its card."""

    folder: Annotated[Path, Option("drafter", argument=True, check=_check_checkpoint)]
    """A folder that `draftsmith train` wrote."""
    repo: Annotated[str, replace(REPOSITORY, argument=True)]
    """Hub repository, user/name; created unless it exists."""
    evaluation: Annotated[Path | None, Option("--eval")] = None
    """Result of `draftsmith eval`: its folder or eval.json."""
    measured_as: Annotated[str | None, Option("--as")] = None
    """The drafter's name in that result."""
    licence: Annotated[str | None, Option(check=check_licence)] = None
    """The Hub's identifier: apache-2.0, mit."""
    base_model: Annotated[str | None, REPOSITORY] = None
    """Hub id of the target: user/name."""
    revision: str | None = None
    """Push to this branch."""
    message: str | None = None
    """Commit message."""
    private: bool = False
    """Create the repository as a private one."""
    dry_run: bool = False
    """Write the folder without uploading it."""
    out: Path | None = None
    """Folder for the published files; in a dry run by default runs/push/NAME."""


@with_settings
def push(settings: Push) -> None:
    """Publish a drafter on the Hub, with a model card from its run and its evaluation."""
    from draftsmith.hub.push import Publication, assemble, check_out, check_publication, run_of, upload
    from draftsmith.train.run_folder import read_metrics

    folder, repo, out = settings.folder, settings.repo, settings.out
    card = settings.model_dump(include={"folder", "repo", "evaluation", "measured_as", "licence", "base_model"})
    publication = Publication(**card, metrics=read_metrics(run_of(folder)))
    for note in check_publication(publication):
        typer.echo(printable(f"note: {note}"), err=True)
    if out is not None:
        check_out(out, folder)
    if settings.dry_run:
        out = out or Path("runs/push") / repo.partition("/")[2]
        files = assemble(publication, out)
        typer.echo(f"nothing was uploaded; {out} holds what would be:")
        for file in files:
            typer.echo(f"  {file}  {(out / file).stat().st_size:,} bytes")
        words = [
            word
            for field in option_fields(Push)
            if not field.form.argument and field.name not in ("--out", "--dry-run")
            if (value := getattr(settings, str(field.path[0])))
            for word in ([field.name] if value is True else [field.name, value])
        ]
        return suggest("draftsmith", "push", folder, repo, *words)
    with TemporaryDirectory(prefix="draftsmith-push-") as temporary:
        place = out or Path(temporary) / "publication"
        try:
            assemble(publication, place)
        except OSError as error:
            raise DraftsmithError(f"push={repo}: {place} cannot be written ({error}); nothing was published") from error
        message = settings.message or f"{publication.title}, by draftsmith"
        page = upload(place, repo, message, revision=settings.revision, private=settings.private)
    typer.echo(page)
    if target := publication.target:
        suggest(
            "draftsmith",
            "demo",
            "--target",
            target,
            "--drafter",
            f"{repo}@{settings.revision}" if settings.revision else repo,
        )
