"""From names to folders: `draftsmith export` and `draftsmith import`."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from draftsmith.distill.embedded import embedded_target
from draftsmith.distill.targets import EMBEDDED, check_target_name, load_target
from draftsmith.errors import ConfigError
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, load_drafter, save_drafter
from draftsmith.heads.downloads import local_folder
from draftsmith.heads.named import is_named
from draftsmith.heads.stored_config import read_config
from draftsmith.hub.export import (
    DTYPES,
    USUAL_LENGTH,
    Exported,
    check_export,
    export_drafter,
    require_empty,
    stored_dtype,
)
from draftsmith.locks import hold_name
from draftsmith.safe_text import Terminal
from draftsmith.storage import atomic_folder, require_apart

SHOWN = 40
"""Tensors that are listed one by one."""


@dataclass(frozen=True)
class ExportRequest:
    drafter: str
    target: str
    format: str
    out: Path
    dtype: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ImportRequest:
    drafter: str
    target: str
    out: Path
    draft_length: int | None = None
    revision: str | None = None
    trust_remote_code: bool = False


def export_to(request: ExportRequest) -> Exported:
    """Check what can be checked cheaply, then load target and drafter and write."""
    check_export(request.format, None, request.dtype, request.out)
    _require_apart(request)
    with hold_name("out", request.out):
        require_empty(request.out)
        return _export(request)


def _export(request: ExportRequest) -> Exported:
    folder = _folder(request.drafter)
    check_target_name(request.target)
    _, stored = read_config(folder, request.drafter)
    check_export(request.format, None if stored is None else stored.type, request.dtype, request.out)
    dtype = request.dtype or stored_dtype(folder) or "float32"
    options = {"revision": request.revision, "trust_remote_code": request.trust_remote_code, "device": "cpu"}
    loaded = load_target(request.target, dtype=_loading_dtype(dtype), **options)
    return export_drafter(
        load_drafter(folder, loaded.model, loaded.tokenizer),
        loaded.model,
        request.format,
        request.out,
        target_name=_servable(request.target),
        revision=loaded.revision,
        dtype=dtype,
        tokenizer=loaded.tokenizer,
    )


def import_from(request: ImportRequest) -> TrainableDrafter:
    """Load what was published for the target, and save it as a draftsmith checkpoint."""
    require_empty(request.out)
    if request.draft_length is not None and request.draft_length < 1:
        raise ConfigError.of("gamma", request.draft_length, ">= 1")
    _require_apart(request)
    with hold_name("out", request.out):
        require_empty(request.out)
        return _import(request)


def _import(request: ImportRequest) -> TrainableDrafter:
    folder = _folder(request.drafter)
    check_target_name(request.target)
    if read_config(folder, request.drafter)[1] is not None:
        raise ConfigError(f"drafter={request.drafter} is draftsmith's own already; expected another project's layout")
    options = {"revision": request.revision, "trust_remote_code": request.trust_remote_code, "device": "cpu"}
    dtype = stored_dtype(folder) or "float32"
    loaded = load_target(request.target, dtype=_loading_dtype(dtype), **options)
    drafter = load_drafter(folder, loaded.model, loaded.tokenizer).to(DTYPES[dtype])
    length = request.draft_length or drafter.draft_length_hint or USUAL_LENGTH
    most = drafter.max_draft_length
    if request.draft_length is not None and most is not None and length > most:
        raise ConfigError.of("gamma", length, f"at most {most}, as far as this drafter reaches")
    drafter.draft_length_hint = min(length, most or length)
    with atomic_folder(request.out) as temporary:
        save_drafter(
            drafter,
            temporary,
            target=describe_target(loaded.model, loaded.tokenizer, request.target, loaded.revision),
            recipe=None,
            draft_length=drafter.draft_length_hint,
            tokenizer=loaded.tokenizer,
        )
    return drafter


def _require_apart(request: ExportRequest | ImportRequest) -> None:
    for source in (request.drafter, request.target):
        if Path(source).expanduser().is_dir():
            require_apart("out", request.out, Path(source))


def _loading_dtype(dtype: str) -> str:
    """That of the target: loading brings the drafter to it, and its weights are to stay as they are.

    float16 is not wide enough for the weights of a target in bfloat16, which would be another target's.
    """
    return "float32" if dtype == "float16" else dtype


def _folder(drafter: str) -> Path:
    if is_named(drafter) and not Path(drafter).is_dir():
        raise ConfigError(f"drafter={drafter} has no weights; expected a folder or a Hub id of a trained drafter")
    return local_folder(drafter)


def _servable(target: str) -> str:
    """What another engine can load: a Hub id, or a folder with its whole path."""
    if target == EMBEDDED:
        return str(embedded_target())
    folder = Path(target).expanduser()
    return str(folder.resolve()) if folder.is_dir() else target


def show_export(exported: Exported) -> None:
    console = Terminal(soft_wrap=True)
    table = Table("tensor", "dtype", "shape")
    for name, (dtype, shape) in list(exported.tensors.items())[:SHOWN]:
        table.add_row(name, dtype, " × ".join(map(str, shape)))
    console.print(table)
    if len(exported.tensors) > SHOWN:
        console.print(f"… and {len(exported.tensors) - SHOWN} more tensors")
    files = sorted(str(file.relative_to(exported.folder)) for file in exported.folder.rglob("*") if file.is_file())
    console.print(f"{exported.folder}: {', '.join(files)}")
    console.print(f"{len(exported.tensors)} tensors, {exported.parameters:,} numbers, for {exported.serving.engine}")
    if exported.adapted:
        console.print("note: the target was trained with this drafter: merge its adapter and serve that, see README.md")
    for note in exported.serving.notes:
        console.print(f"note: {note}")
    console.print(f"\n{exported.usage}")


def show_import(request: ImportRequest, drafter: TrainableDrafter) -> None:
    count = sum(parameter.numel() for parameter in drafter.parameters())
    console = Terminal(soft_wrap=True)
    console.print(f"{request.out}: a drafter of type {drafter.type}, {count:,} parameters, draft length", end=" ")
    console.print(drafter.draft_length_hint)
    console.print(f"\ndraftsmith eval --target {request.target} --drafter {request.out}")
    console.print(f"draftsmith check --target {request.target} --drafter {request.out}")
