"""`draftsmith export` and `draftsmith import` on the command line. Rooms are imported inside each, as in cli.py.

`draftsmith push` on the command line.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from draftsmith.cli.options import TargetOption, TrustOption
from draftsmith.errors import DraftsmithError
from draftsmith.safe_text import printable

OutOption = Annotated[Path, typer.Option("--out", help="A new folder.")]


def export(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter.")],
    target: TargetOption,
    out: OutOption,
    format: Annotated[str, typer.Option("--format", help="vllm, sglang, eagle, medusa or transformers.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; by default as it is stored.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of the target, on the Hub.")] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Write a drafter as vLLM, SGLang, transformers or the original repositories read it."""
    from draftsmith.hub.export import ExportRequest, export_to, show_export

    request = ExportRequest(drafter, target, format, out, dtype, revision, trust_remote_code)
    show_export(export_to(request))


def import_(
    drafter: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter in another project's layout.")],
    target: TargetOption,
    out: OutOption,
    draft_length: Annotated[
        int | None, typer.Option("--gamma", help="Draft length to note; by default what the layout says, or 3.")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of the target, on the Hub.")] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Read a published drafter, check that it fits the target, and save it as draftsmith's own."""
    from draftsmith.hub.export import ImportRequest, import_from, show_import

    request = ImportRequest(drafter, target, out, draft_length, revision, trust_remote_code)
    show_import(request, import_from(request))


def push(
    drafter: Annotated[Path, typer.Argument(help="A folder that `draftsmith train` wrote.")],
    repo: Annotated[str, typer.Argument(help="On the Hub: user/name. Made where there is none.")],
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="What `draftsmith eval` wrote: a folder, or its eval.json.")
    ] = None,
    measured_as: Annotated[str | None, typer.Option("--as", help="The drafter's name in that measurement.")] = None,
    licence: Annotated[str | None, typer.Option("--licence", help="The Hub's name of one: apache-2.0, mit.")] = None,
    base_model: Annotated[str | None, typer.Option("--base-model", help="The target on the Hub: user/name.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make it private, where it is made.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Push to this branch.")] = None,
    message: Annotated[str | None, typer.Option("--message", help="Of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder, upload nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Keep the published folder here; of a dry run runs/push/NAME.")
    ] = None,
) -> None:
    """Publish a drafter on the Hub, with a model card made from its run and its measurement."""
    from draftsmith.hub.publication import STALE, Publication, assemble, check_out, check_publication, run_of
    from draftsmith.hub.push import Destination, prepare, upload
    from draftsmith.train.run_folder import read_metrics

    options = {"evaluation": evaluation, "measured_as": measured_as, "licence": licence, "base_model": base_model}
    publication = Publication(drafter, repo, metrics=read_metrics(run_of(drafter)), **options)
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
        return
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
        commit = upload(folder, destination, message or f"{publication.title}, by draftsmith", stale=STALE)
    typer.echo(f"{destination.page} at {commit[:12]}")
