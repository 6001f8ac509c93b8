"""`draftsmith export` and `draftsmith import`: write a drafter in another engine's format, and read one.

The formats are in `heads/formats/`.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.distill import gguf_target
from draftsmith.distill.embedded import embedded_target
from draftsmith.distill.layerless import load_without_layers
from draftsmith.distill.load_target import DTYPES, LoadedTarget, load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter, TrainableDrafter
from draftsmith.heads.checkpoint import describe_target, load_drafter, save_drafter
from draftsmith.heads.configs import require_weights
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.common import Serving, Source, name_of
from draftsmith.heads.formats.llama_cpp import gguf_package
from draftsmith.heads.formats.published import unknown_keys
from draftsmith.heads.formats.writers import LAYOUTS
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.untrusted import local_folder, read_config
from draftsmith.hub.conventions import prompts_of, readings_of, self_test_lines, settle
from draftsmith.names import EMBEDDED, GGUF, check_target_name
from draftsmith.storage import atomic_folder, require_empty, write_text
from draftsmith.terminal import Terminal, markdown_environment, stage

ALONE = {
    "vllm": Serving("vLLM", "vllm serve {folder}"),
    "sglang": Serving("SGLang", "python -m sglang.launch_server --model-path {folder} --enable-metrics"),
    "gguf": Serving("llama.cpp", "llama-server -m {folder}/drafter.gguf --port 8080 --metrics"),
    "transformers": Serving(
        "transformers", 'from transformers import AutoModel\n\ntarget = AutoModel.from_pretrained("{folder}")', "python"
    ),
}
"""How to use a target that was written as a draft model, by format."""
USUAL_LENGTH = 3
"""Draft length of a drafter that does not store the one that it was chosen for."""


@dataclass(frozen=True)
class Exported:
    """A written export."""

    folder: Path
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    """(dtype, shape) by name."""
    serving: Serving
    adapted: bool = False
    """The target was trained jointly with the drafter and is not the original."""
    alone: bool = False
    """The file is the target itself, which is served without a drafter."""

    @property
    def parameters(self) -> int:
        """Parameters in the file, without embeddings and lm_head that an engine shares with the target."""
        return sum(torch.Size(shape).numel() for _, shape in self.tensors.values())

    @property
    def usage(self) -> str:
        return self.serving.usage_of(str(self.folder))


def check_export(format: str, type: str | None, dtype: str | None, out: Path) -> None:
    """Check the format, that it supports drafters of this type, the dtype, and that `out` is empty; else ConfigError.

    `type`: None if it is not known yet.
    """
    if format not in LAYOUTS:
        raise ConfigError.of("format", format, f"one of {', '.join(LAYOUTS)}")
    if type is not None and type not in LAYOUTS[format]:
        able = [name for name, layout in LAYOUTS.items() if type in layout]
        raise ConfigError.of("format", format, f"{', '.join(able)} for a drafter of type {type}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError.of("dtype", dtype, f"one of {', '.join(DTYPES)}")
    require_empty("out", out)


def stored_dtype(folder: Path) -> str | None:
    """Return the widest dtype of the floats in a folder's safetensors; None if there is none of `DTYPES`."""
    dtypes = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                dtypes |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return next(
        (name for code, name in (("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")) if code in dtypes), None
    )


def export_drafter(
    drafter: Drafter,
    target: PreTrainedModel,
    format: str,
    out: Path,
    *,
    target_name: str,
    revision: str | None = None,
    dtype: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    alone: bool = False,
) -> Exported:
    """Write `drafter` into the folder `out`, in one step.

    Args:
        drafter: as `load_drafter` returns it, attached to `target`.
        format: a key of `LAYOUTS`.
        out: a new or an empty folder.
        target_name: the target that the engine loads: a Hub id or a folder.
        dtype: float32, bfloat16 or float16; by default the drafter's.
        tokenizer: the target's, written next to a drafter that is loaded as a standalone model.
        alone: whether the drafter is the target itself.

    Raises:
        ConfigError: if the format cannot express the drafter; nothing is written then.
    """
    if not isinstance(drafter, TrainableDrafter):
        raise ConfigError(f"drafter of type {getattr(drafter, 'type', None)} has no weights; expected a trained one")
    kind = drafter.type
    check_export(format, kind, dtype, out)
    chosen = next(drafter.parameters()).dtype if dtype is None else DTYPES[dtype]
    length = min(drafter.draft_length_hint or USUAL_LENGTH, drafter.max_draft_length or 2**40)
    made_for = describe_target(target, tokenizer, target_name, revision)
    made_for |= {} if drafter.target_quality is None else {"quality": drafter.target_quality}
    with atomic_folder(out) as temporary:
        source = Source(drafter, target, temporary, target_name, length, chosen, made_for, tokenizer)
        with torch.no_grad():
            serving = LAYOUTS[format][drafter.type](source)
        if alone:
            serving = replace(ALONE[format], notes=["This is the target itself: a drafter for it is another folder."])
        write_text(temporary / "README.md", _readme(source, serving, format, revision))
        tensors = _tensors(temporary)
    return Exported(out, tensors, serving, drafter.target_quality is not None, alone)


def _tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                part = tensors.get_slice(name)
                shapes[name] = (part.get_dtype(), tuple(part.get_shape()))
    for file in folder.glob("*.gguf"):
        for part in gguf_package().GGUFReader(file).tensors:
            shapes[part.name] = (part.tensor_type.name, tuple(part.shape.tolist()[::-1]))
    return shapes


def _readme(source: Source, serving: Serving, format: str, revision: str | None) -> str:
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
        "usage": serving.usage_of("."),
        "quality": source.drafter.target_quality,
        "notes": serving.notes,
        "own": (source.folder / "config.json").is_file() and read_config(source.folder, source.folder)[1] is not None,
    }
    return markdown_environment().from_string(text).render(values)


def export_to(
    drafter: str,
    target: str,
    format: str,
    out: Path,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Load a target and its drafter by their names, and write the export into the folder `out`."""
    check_export(format, None, dtype, out)
    check_target_name(target)
    if drafter.endswith(GGUF):
        dequantized = gguf_target.model(Path(drafter).expanduser(), DTYPES[dtype or "float32"])
        name, folder = dequantized, dequantized
    else:
        name, folder = _weights(drafter, target)
    _, stored = read_config(folder, drafter)
    check_export(format, None if stored is None else stored.type, dtype, out)
    dtype = dtype or stored_dtype(folder) or "float32"
    recipe = {} if stored is None else stored.recipe or {}
    if recipe.get("teacher", {}).get("kind") == "server":  # only an engine can hold its layers
        loaded = load_without_layers(target, revision=revision, dtype="float32" if dtype == "float16" else dtype)
    else:
        loaded = _load_target(target, dtype, revision, trust_remote_code)
    served = target if format == "gguf" else gguf_target.plain_folder(loaded.model) or target
    return export_drafter(
        load_drafter(name, loaded.model, loaded.tokenizer),
        loaded.model,
        format,
        out,
        target_name=servable(served),
        revision=loaded.revision,
        dtype=dtype,
        tokenizer=loaded.tokenizer,
        alone=servable(drafter) == servable(target),
    )


def import_from(
    drafter: str,
    target: str,
    out: Path,
    *,
    draft_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    self_test: bool = True,
    prompts: str | None = None,
    chat_template: str | None = None,
) -> tuple[TrainableDrafter, list[str]]:
    """Save a drafter that another project published for the target as a draftsmith checkpoint in `out`.

    Args:
        self_test: compare it with the target under each convention on `prompts`, see `hub.conventions`.

    Returns:
        The drafter, and lines on keys of its config.json that are not read, and of the self-test.
    """
    require_empty("out", out)
    check_target_name(target)
    name, folder = _weights(drafter, target)
    config, stored = read_config(folder, drafter)
    if name == folder and stored is not None:
        raise ConfigError(f"drafter={drafter} is a draftsmith checkpoint; expected another project's layout")
    asked, lines = list[list[int]](), list[str]()
    if self_test:
        tokenizer, target_config = load_tokenizer(target, revision=revision, trust_remote_code=trust_remote_code)
        asked, lines = prompts_of(prompts, tokenizer, context_limit(target_config), chat_template)
    dtype = stored_dtype(folder) or "float32"
    loaded = _load_target(target, dtype, revision, trust_remote_code)
    read = load_drafter(name, loaded.model, loaded.tokenizer, unstated=self_test)
    assert isinstance(read, TrainableDrafter), "a folder holds a drafter with weights"
    read.to(DTYPES[dtype])
    if self_test:
        with stage("comparing the drafter with the target"):
            readings = readings_of(loaded.model, read, asked)
            if read.unstated:
                try:
                    lines += settle(read, readings)
                except ConfigError as error:
                    raise ConfigError(f"drafter={drafter}: {error}") from None
                readings = readings_of(loaded.model, read, asked)
        lines += self_test_lines(readings)
    length, most = draft_length or read.draft_length_hint or USUAL_LENGTH, read.max_draft_length
    if draft_length is not None and most is not None and length > most:
        raise ConfigError.of("gamma", length, f"at most {most}, as far as this drafter reaches")
    read.draft_length_hint = min(length, most or length)
    with atomic_folder(out) as temporary:
        save_drafter(
            read,
            temporary,
            target=describe_target(loaded.model, loaded.tokenizer, target, loaded.revision),
            recipe=None,
            draft_length=read.draft_length_hint,
            tokenizer=loaded.tokenizer,
        )
    unread = unknown_keys(config) if isinstance(read, DraftModel) else read.unread_keys
    return read, [*([f"note: keys of config.json that are not read: {', '.join(unread)}"] if unread else []), *lines]


def _load_target(target: str, dtype: str, revision: str | None, trust_remote_code: bool) -> LoadedTarget:
    """Load the target in `dtype`, to which loading converts the drafter, so that its weights stay as they are.

    For float16 the target is loaded in float32: in float16, weights of a bfloat16 target would change.
    """
    dtype = "float32" if dtype == "float16" else dtype
    return load_target(target, revision=revision, dtype=dtype, trust_remote_code=trust_remote_code, device="cpu")


def _weights(drafter: str, target: str) -> tuple[str | Path, Path]:
    """Return the drafter as `load_drafter` takes it, and the folder of its weights, for `native-mtp` the target's."""
    if drafter == "native-mtp":
        return drafter, local_folder(servable(target))
    require_weights(drafter)
    folder = embedded_target() if drafter == EMBEDDED else local_folder(drafter)
    return folder, folder


def servable(target: str) -> str:
    """Return the target as another engine loads it: a Hub id, or the absolute path of a folder."""
    if target == EMBEDDED:
        return str(embedded_target())
    folder = Path(target).expanduser()
    return str(folder.resolve()) if folder.is_dir() else target


def show_export(exported: Exported) -> None:
    console = Terminal(soft_wrap=True)
    files = sorted(str(file.relative_to(exported.folder)) for file in exported.folder.rglob("*") if file.is_file())
    console.print(f"{exported.folder}: {', '.join(files)}")
    console.print(f"{len(exported.tensors)} tensors, {exported.parameters:,} numbers, for {exported.serving.engine}")
    if exported.adapted:
        console.print("note: the target was trained with this drafter: merge its adapter and serve that, see README.md")
    for note in exported.serving.notes:
        console.print(f"note: {note}")
    console.print(f"\n{exported.usage}")
