"""The commands `export`, `import` and `push`. Packages are imported inside each, so that `--help` stays fast."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from draftsmith.cli.options import at_least_one, flag, suggest, taking
from draftsmith.errors import DraftsmithError
from draftsmith.names import check_repo
from draftsmith.terminal import printable

OutOption = Annotated[Path, typer.Option("--out", help="A new folder.")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Revision of the target on the Hub.")]


@taking("target", "trust_remote_code")
def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter, or native-mtp.")],
    target: str,
    trust_remote_code: bool,
    out: OutOption,
    format: Annotated[
        str,
        typer.Option("--format", help="vllm, sglang, gguf, transformers or native."),
    ],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default the stored one.")
    ] = None,
    revision: RevisionOption = None,
) -> None:
    """Write a drafter in the format of vLLM, SGLang, llama.cpp or transformers."""
    from draftsmith.hub.export import export_to, show_export

    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    exported = export_to(drafter, target, format, out, dtype=dtype, **loading)
    show_export(exported)
    if (port := exported.serving.port) is None:
        return suggest("draftsmith", "eval", "--target", target, "--drafter", out)
    served = ["--target", target, "--model", exported.serving.model]
    suggest("draftsmith", "eval", "server", f"http://localhost:{port}", *served)


@taking("target", "trust_remote_code")
def import_(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter in another project's layout.")],
    target: str,
    trust_remote_code: bool,
    out: OutOption,
    draft_length: Annotated[
        int | None,
        typer.Option(
            "--gamma", help="Draft length to store; by default the published one, or 3.", callback=at_least_one
        ),
    ] = None,
    revision: RevisionOption = None,
    self_test: Annotated[
        bool,
        typer.Option(
            help="Compare alpha with that of the nearest conventions, on a few texts of the target.", metavar=""
        ),
    ] = True,
) -> None:
    """Read a published drafter, check that it fits the target, and save it in draftsmith's format."""
    from draftsmith.hub.conventions import self_test_lines
    from draftsmith.hub.export import import_from

    loading = {"revision": revision, "trust_remote_code": trust_remote_code}
    read, readings = import_from(drafter, target, out, draft_length=draft_length, self_test=self_test, **loading)
    count = sum(parameter.numel() for parameter in read.parameters())
    about = f"a drafter of type {read.type}, {count:,} parameters, draft length {read.draft_length_hint}"
    for line in (f"{out}: {about}", *self_test_lines(readings)):
        typer.echo(line)
    for command in ("eval", "check"):
        suggest("draftsmith", command, "--target", target, "--drafter", out)


def push(
    drafter: Annotated[Path, typer.Argument(help="A folder that `draftsmith train` wrote.", exists=True)],
    repo: Annotated[str, typer.Argument(help="Hub repository, user/name; created unless it exists.")],
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Result of `draftsmith eval`: its folder or eval.json.")
    ] = None,
    measured_as: Annotated[str | None, typer.Option("--as", help="The drafter's name in that result.")] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="The Hub's identifier: apache-2.0, mit.")] = None,
    base_model: Annotated[str | None, typer.Option("--base-model", help="Hub id of the target: user/name.")] = None,
    private: Annotated[bool, flag("--private", "Create the repository as a private one.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Push to this branch.")] = None,
    message: Annotated[str | None, typer.Option("--message", help="Commit message.")] = None,
    dry_run: Annotated[bool, flag("--dry-run", "Write the folder without uploading it.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the published files; in a dry run by default runs/push/NAME."),
    ] = None,
) -> None:
    """Publish a drafter on the Hub, with a model card from its run and its evaluation."""
    check_repo("repo", repo)  # before torch is imported
    from draftsmith.hub.push import (
        Destination,
        Publication,
        assemble,
        check_out,
        check_publication,
        prepare,
        run_of,
        upload,
    )
    from draftsmith.train.run_folder import read_metrics

    publication = Publication(
        drafter,
        repo,
        metrics=read_metrics(run_of(drafter)),
        evaluation=evaluation,
        measured_as=measured_as,
        licence=licence,
        base_model=base_model,
    )
    for note in check_publication(publication):
        typer.echo(printable(f"note: {note}"), err=True)
    if out is not None:
        check_out(out, drafter)
    if dry_run:
        out = out or Path("runs/push") / repo.partition("/")[2]
        files = assemble(publication, out)
        typer.echo(f"nothing was uploaded; {out} holds what would be:")
        for file in files:
            typer.echo(f"  {file}  {(out / file).stat().st_size:,} bytes")
        given = {"eval": evaluation, "as": measured_as, "licence": licence, "base-model": base_model}
        given |= {"revision": revision, "message": message}
        words = [word for key, value in given.items() if value is not None for word in (f"--{key}", value)]
        return suggest("draftsmith", "push", drafter, repo, *words, *["--private"] * private)
    destination = Destination(repo, revision, private)
    prepare(destination)
    with TemporaryDirectory(prefix="draftsmith-push-") as temporary:
        folder = out or Path(temporary) / "publication"
        try:
            assemble(publication, folder)
        except OSError as error:
            raise DraftsmithError(
                f"push={repo}: {folder} cannot be written ({error}); nothing was published"
            ) from error
        commit = upload(folder, destination, message or f"{publication.title}, by draftsmith")
    typer.echo(f"{destination.page} at {commit[:12]}")
    if target := publication.target:
        suggest("draftsmith", "demo", "--target", target, "--drafter", f"{repo}@{revision}" if revision else repo)
