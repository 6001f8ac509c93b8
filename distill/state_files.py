"""Teacher states that a serving engine wrote: one file for each text, so that the target does not run in training.

    vLLM, speculators   token_ids [T], hidden_states [T, S, H]

No such file names its target or the layers that it holds. So they are measured before training: the target reads the
beginnings of a few of the texts, and each stored layer is compared with each of the target's.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.distill.teacher import Batch, OnlineTeacher, stored_layers
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import FINAL
from draftsmith.heads.hidden_states import layers_name
from draftsmith.heads.lm_head import logits_map
from draftsmith.heads.model_config import text_config

# Shapes: T tokens, S stored layers, L layers of the target and its final states, H hidden size, W = H + F values.

UNREADABLE = (OSError, KeyError, ValueError, RuntimeError, SafetensorError)
TOLERANCE = 0.1
"""Largest difference between stored states and the target's, relative to their norm: the median over tokens."""
COMPARED_TEXTS, COMPARED_TOKENS = 8, 128
"""Texts that the target reads to recognise the layers, and tokens of each."""


class StoredText(NamedTuple):
    """One file. The tensors are mapped into memory, and read where they are used."""

    ids_T: Tensor
    states_TSH: Tensor


def open_states(file: Path, vocab_size: int, hidden_size: int) -> StoredText:
    """Return the tensors of a file; one of `UNREADABLE` where they are cut off, or have other names or shapes."""
    tensors = load_file(file)
    ids_T, states_TSH = tensors["token_ids"], tensors["hidden_states"]
    shapes = len(ids_T) and ids_T.ndim == 1 and states_TSH.shape == (len(ids_T), states_TSH.shape[1], hidden_size)
    if not shapes or not states_TSH.is_floating_point():
        raise ValueError(f"token_ids {list(ids_T.shape)}, hidden_states {list(states_TSH.shape)} {states_TSH.dtype}")
    if not 0 <= int(ids_T.min()) <= int(ids_T.max()) < vocab_size:
        raise ValueError(f"token ids from {int(ids_T.min())} to {int(ids_T.max())}, not below {vocab_size}")
    return StoredText(ids_T, states_TSH)


class StateFiles:
    """The files of a folder, found by their tokens.

    Args:
        vocab_size, hidden_size: the target's.
        report: called with the number of files that cannot be read.

    Raises:
        ConfigError: for a folder without such files, or in which none can be read or they hold different layers.
    """

    def __init__(self, folder: str, vocab_size: int, hidden_size: int, report: Callable[[str], None]) -> None:
        self.folder, self._vocab_size, self._hidden_size = folder, vocab_size, hidden_size
        place = Path(folder).expanduser()
        files = sorted(place.rglob("*.safetensors")) if place.is_dir() else []
        if not files:
            raise ConfigError.of("teacher.file", folder, "a folder of states in .safetensors")
        self._files: dict[bytes, Path] = {}
        layers: dict[int, Path] = {}
        damaged: list[str] = []
        for file in files:
            try:
                text = self.open(file)
            except UNREADABLE as error:
                damaged.append(f"{file.name}: {reason_of(error)}")
                continue
            layers.setdefault(text.states_TSH.shape[1], file)
            self._files[_key(text.ids_T.tolist())] = file
        if damaged:
            said = f"{len(damaged):,} of {len(files):,} files cannot be read (the first, {damaged[0]})"
            if len(damaged) == len(files):
                raise ConfigError(f"teacher.file={folder}: {said}; expected states of hidden size {hidden_size}")
            report(f"{folder}: {said}: left out")
        if len(layers) > 1:
            shown = ", ".join(f"{file.name} has {count}" for count, file in layers.items())
            raise ConfigError(f"teacher.file={folder}: numbers of layers differ ({shown}); expected one number")

    def open(self, file: Path) -> StoredText:
        """Return the tensors of a file; one of `UNREADABLE` where they have other names or shapes."""
        return open_states(file, self._vocab_size, self._hidden_size)

    def find(self, ids: Sequence[int]) -> Path | None:
        """Return the file with the states of these tokens; those of the last one may be missing.

        No training target depends on them, and an engine that returns the states of what it generated has not read the
        last token.
        """
        return self._files.get(_key(ids)) or self._files.get(_key(ids[:-1]))

    def covered(self, rows: Dataset, source: str, report: Callable[[str], None]) -> Dataset:
        """Return the rows whose states are in the files; ConfigError if there are none."""
        kept = [place for place, ids in enumerate(rows["input_ids"]) if self.find(ids) is not None]
        if not kept:
            raise ConfigError(
                f"teacher.file={self.folder}: no file has the tokens of a row of data.prompts={source}; expected "
                "states of the same token ids, such as the input_ids that `draftsmith data regenerate` writes"
            )
        if len(kept) < len(rows):
            report(f"{source}: {len(rows) - len(kept):,} of {len(rows):,} have no states in {self.folder}: left out")
        return rows.select(kept)


class FileStates:
    """The states of training rows, read from `files`; see `CachedTeacher`.

    The final states and `layers` are recognised among those of the files by comparison with the target's own.

    Raises:
        ConfigError: where the files hold the states of another target, or not all of the needed layers.
    """

    def __init__(self, files: StateFiles, model: PreTrainedModel, layers: tuple[int, ...], rows: Dataset) -> None:
        self._files, self._rows, self._packed = files, rows, "documents" in rows.column_names
        compared = range(0, len(rows), max(1, len(rows) // COMPARED_TEXTS))[:COMPARED_TEXTS]
        texts = [self._open(self._texts(row)[0]) for row in compared]
        self._finish: Callable[[Tensor], Tensor] | None = None
        self.error, self._order = self._recognised(model, stored_layers(layers), texts)

    @torch.no_grad()
    def read(self, rows: Sequence[int]) -> tuple[Tensor]:
        """Return the states [B, T, W] of rows, with zeros after each: the final states, then `stored_layers`."""
        states = [torch.cat([self._states(ids) for ids in self._texts(row)]) for row in rows]
        return (nn.utils.rnn.pad_sequence(states, batch_first=True),)

    def _texts(self, row: int) -> list[list[int]]:
        """Return the texts of a row, of which packed ones have several."""
        ids = self._rows[row]["input_ids"]
        lengths = self._rows[row]["documents"] if self._packed else [len(ids)]
        return [part.tolist() for part in torch.tensor(ids).split(lengths)]

    def _open(self, ids: list[int]) -> StoredText:
        """Return the stored text of these tokens, without padding."""
        file = self._files.find(ids)
        assert file is not None, "rows without a file were left out"
        try:
            text = self._files.open(file)
        except UNREADABLE as error:
            raise ConfigError(f"teacher.file: {file} cannot be read ({reason_of(error)})") from error
        return StoredText(text.ids_T[: len(ids)], text.states_TSH[: len(ids)])

    def _states(self, ids: list[int]) -> Tensor:
        """Return the final states and the other layers of a text [T, W]; zeros where the last one is missing."""
        final_TH, *others = self._open(ids).states_TSH[:, self._order].unbind(1)
        if self._finish is not None:
            final_TH = self._finish(final_TH).to(final_TH)
        return nn.functional.pad(torch.cat([final_TH, *others], -1), (0, 0, 0, len(ids) - len(final_TH)))

    def _recognised(
        self, model: PreTrainedModel, layers: tuple[int, ...], texts: Sequence[StoredText]
    ) -> tuple[float, list[int]]:
        """Return the largest difference from the target's states, and the indices of the final states and of `layers`.

        vLLM stores the output of the last layer without the norm after it, which is then applied to it.
        """
        depth = text_config(model).num_hidden_layers
        teacher = OnlineTeacher(model, tuple(range(1, depth + 1)))
        errors_SL = torch.stack([_errors(teacher, text) for text in texts]).amax(0)
        nearest = [FINAL if place == depth else place + 1 for place in errors_SL.argmin(1).tolist()]
        least = errors_SL.amin(1).tolist()
        known = {layer: number for number, layer in enumerate(nearest) if least[number] < TOLERANCE}
        shown = ", ".join(f"{_named(layer)} ({error:.1%} off)" for layer, error in zip(nearest, least, strict=True))
        if not known:
            raise ConfigError(
                f"teacher.file={self._files.folder}: the states are not the target's; the nearest ones are {shown}; "
                f"expected a difference below {TOLERANCE:.0%}"
            )
        if FINAL not in known and depth in known:
            self._finish = _last_norm(model, teacher, texts[0].ids_T.tolist())
            known[FINAL] = known[depth]
        missing = [layer for layer in (FINAL, *layers) if layer not in known]
        if missing:
            wanted = " and ".join(map(_named, missing))
            raise ConfigError(
                f"teacher.file={self._files.folder} holds {shown}; expected {wanted} as well "
                f"(the final states are layer {depth} for vLLM)"
            )
        used = [known[layer] for layer in (FINAL, *layers)]
        return max(least[number] for number in used), used


def _errors(teacher: OnlineTeacher, text: StoredText) -> Tensor:
    """Return the difference [S, L] between each stored layer of a text and each of the target's."""
    ids = text.ids_T[:COMPARED_TOKENS].tolist()
    own_LTH = _own_states(teacher, ids)
    errors = []
    for stored_TH in text.states_TSH[: len(ids)].to(own_LTH).unbind(1):
        errors.append(((stored_TH - own_LTH).norm(dim=-1) / own_LTH.norm(dim=-1)).median(-1).values)
    return torch.stack(errors)


def _own_states(teacher: OnlineTeacher, ids: list[int]) -> Tensor:
    """Return the target's states of a text: its layers in order, and the final ones [L, T, H] in fp32."""
    ids_1T = torch.tensor([ids], device=teacher.lm_head.weight.device)
    signals = teacher.signals(Batch(ids_1T, torch.ones_like(ids_1T), torch.ones_like(ids_1T, dtype=torch.bool)))
    final_TH, features_TF = signals.hidden_BTH[0], signals.features_BTF
    assert features_TF is not None, "the teacher has layers"
    layers_LTH = features_TF[0].reshape(len(ids), -1, final_TH.shape[-1]).transpose(0, 1)
    return torch.cat([layers_LTH, final_TH[None]]).float().cpu()


def _last_norm(model: PreTrainedModel, teacher: OnlineTeacher, ids: list[int]) -> Callable[[Tensor], Tensor]:
    """Return the map from the output of the last layer [T, H] to the input of the lm_head: a norm, and a scale.

    Raises:
        ConfigError: for a target with other operations between the two.
    """
    ids = ids[:COMPARED_TOKENS]
    *_, last_TH, final_TH = _own_states(teacher, ids)
    inside = set(model.get_submodule(layers_name(model)).modules())
    found: list[nn.Module] = []

    def compare(module: nn.Module, arguments: tuple[object, ...]) -> None:
        given = arguments[0] if arguments else None
        if isinstance(given, Tensor) and given.shape[-2:] == last_TH.shape and _near(given[0], last_TH):
            found.append(module)

    leaves = [it for it in model.modules() if it not in inside and not list(it.children()) and list(it.parameters())]
    handles = [module.register_forward_pre_hook(compare) for module in leaves]
    try:
        _own_states(teacher, ids)
    finally:
        for handle in handles:
            handle.remove()
    scale, weight = logits_map(model).state_scale, teacher.lm_head.weight

    def finish(norm: nn.Module, states_TH: Tensor) -> Tensor:
        return (norm(states_TH.to(weight)) * (scale or 1)).cpu()

    with torch.no_grad():
        norm = next((norm for norm in found if _near(finish(norm, last_TH), final_TH)), None)
    if norm is None:
        raise ConfigError(
            f"teacher.kind='files' with {type(model).__name__}, whose final states are no norm of its last layer's; "
            "expected files with the final states"
        )
    return lambda states_TH: finish(norm, states_TH)


def _near(states_TH: Tensor, expected_TH: Tensor) -> bool:
    """Return whether two computations gave the same states; bf16 has 8 bits."""
    difference = (states_TH.float().cpu() - expected_TH).norm()
    return bool(difference <= 0.01 * expected_TH.norm())


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def _named(layer: int) -> str:
    return "the final states" if layer == FINAL else f"layer {layer}"
