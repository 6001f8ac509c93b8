"""Writing a drafter as another engine reads it. What each layout says is in `layouts/`."""

from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedTokenizerBase

from draftsmith.errors import ConfigError
from draftsmith.heads import TrainableDrafter
from draftsmith.heads.checkpoint import describe_target
from draftsmith.heads.stored_config import read_config
from draftsmith.hub.layouts import LAYOUTS
from draftsmith.hub.layouts.layout import Serving, Source, name_of
from draftsmith.safe_text import markdown_environment
from draftsmith.storage import atomic_folder, require_writable, write_text

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
USUAL_LENGTH = 3
"""Draft tokens where a drafter does not say for how many it was chosen."""


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    folder: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """By name: (dtype, shape)."""
    serving: Serving
    adapted: bool = False
    """The target was trained together with the drafter: it is not the original."""

    @property
    def parameters(self) -> int:
        """Numbers in the file; an engine adds embeddings and lm_head where it shares the target's."""
        return sum(torch.Size(shape).numel() for _, shape in self.tensors.values())

    @property
    def usage(self) -> str:
        return self.serving.usage.replace("{folder}", str(self.folder))


def check_export(format: str, type: str | None, dtype: str | None, out: Path) -> None:
    """ConfigError for a format that there is not or that cannot express drafters of this type, and for a full `out`.

    `type`: None where it is not known yet.
    """
    if format not in LAYOUTS:
        raise ConfigError.of("format", format, f"one of {', '.join(LAYOUTS)}")
    if type is not None and type not in LAYOUTS[format]:
        able = [name for name, layout in LAYOUTS.items() if type in layout]
        raise ConfigError.of("format", format, f"{', '.join(able)} for a drafter of type {type}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError.of("dtype", dtype, f"one of {', '.join(DTYPES)}")
    require_empty(out)


def require_empty(out: Path) -> None:
    require_writable("out", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out} is there already; expected a new or an empty folder")


def stored_dtype(folder: Path) -> str | None:
    """The widest dtype of the floats in a folder's safetensors, by name; None where there is none of `DTYPES`."""
    found = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return next(
        (name for code, name in (("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")) if code in found), None
    )


def export_drafter(
    drafter: TrainableDrafter,
    target: nn.Module,
    format: str,
    out: Path,
    *,
    target_name: str,
    revision: str | None = None,
    dtype: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Exported:
    """Write `drafter` into the folder `out`, in one step.

    Args:
        drafter: as `load_drafter` returns it, attached to `target`.
        format: a key of `LAYOUTS`.
        out: a new or an empty folder.
        target_name: what the engine is to load as its target: a Hub id or a folder.
        dtype: float32, bfloat16 or float16; by default that of the drafter.
        tokenizer: the target's, written beside what is loaded as a model of its own.

    Raises:
        ConfigError: where the format cannot say what the drafter is; nothing is written then.
    """
    kind = getattr(drafter, "type", None)
    if not isinstance(drafter, TrainableDrafter):
        raise ConfigError(f"drafter of type {kind} has no weights; expected a trained one")
    check_export(format, kind, dtype, out)
    chosen = next(drafter.parameters()).dtype if dtype is None else DTYPES[dtype]
    length = min(drafter.draft_length_hint or USUAL_LENGTH, drafter.max_draft_length or 2**40)
    made_for = describe_target(target, tokenizer, target_name, revision)
    made_for |= {} if drafter.target_quality is None else {"quality": drafter.target_quality}
    with atomic_folder(out) as temporary:
        source = Source(drafter, target, temporary, target_name, length, chosen, made_for, tokenizer)
        with torch.no_grad():
            serving = LAYOUTS[format][kind](source)
        write_text(temporary / "README.md", _readme(source, serving, format, revision, out.name))
        tensors = _tensors(temporary)
    return Exported(out, tensors, serving, drafter.target_quality is not None)


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                part = tensors.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    return found


def _readme(source: Source, serving: Serving, format: str, revision: str | None, folder: str) -> str:
    text = files("draftsmith.hub").joinpath("export.md.j2").read_text(encoding="utf-8")
    values: dict[str, Any] = {
        "library": "transformers" if format == "transformers" else "draftsmith",
        "type": source.drafter.type,
        "target": source.target_name,
        "engine": serving.engine,
        "revision": revision,
        "dtype": name_of(source.dtype),
        "version": version("draftsmith"),
        "format": format,
        "language": serving.language,
        "usage": serving.usage.replace("{folder}", folder),
        "quality": source.drafter.target_quality,
        "notes": serving.notes,
        "folder": folder,
        "own": read_config(source.folder, source.folder)[1] is not None,
    }
    return markdown_environment().from_string(text).render(values)
