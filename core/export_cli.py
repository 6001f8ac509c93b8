"""`draftsmith export` and `draftsmith import` on the command line. Rooms are imported inside each, as in cli.py."""

from pathlib import Path
from typing import Annotated

import typer

from draftsmith.options import TargetOption, TrustOption

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
    from draftsmith.exchange import ExportRequest, export_to, show_export

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
    from draftsmith.exchange import ImportRequest, import_from, show_import

    request = ImportRequest(drafter, target, out, draft_length, revision, trust_remote_code)
    show_import(request, import_from(request))
