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

from draftsmith.distill.hidden_state_cache import states_of
from draftsmith.distill.layerless import Finish, finish_of
from draftsmith.distill.teacher import OnlineTeacher, stored_layers
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import FINAL
from draftsmith.heads.model_config import text_config

# Shapes: T tokens, S stored layers, L layers of the target and its final states, H hidden size, W = H + F values.

UNREADABLE = (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError)
TOLERANCE = 0.1
"""Largest difference between stored states and the target's, relative to their norm: the median over tokens."""
COMPARED_TEXTS, COMPARED_TOKENS = 8, 128
"""Texts that the target reads to recognise the layers, and tokens of each."""


class StoredText(NamedTuple):
    """A text and its states. The tensors of a file are mapped into memory, and read where they are used."""

    ids_T: Tensor
    states_TSH: Tensor


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
        """Return the tensors of a file; one of `UNREADABLE` where they are cut off, or have other names or shapes."""
        tensors = load_file(file)
        ids_T, states_TSH = tensors["token_ids"], tensors["hidden_states"]
        shape, own = states_TSH.shape, (len(ids_T), *states_TSH.shape[1:2], self._hidden_size)
        if not len(ids_T) or ids_T.ndim != 1 or shape != own or not states_TSH.is_floating_point():
            raise ValueError(f"token_ids {list(ids_T.shape)}, hidden_states {list(shape)} {states_TSH.dtype}")
        if not 0 <= int(ids_T.min()) <= int(ids_T.max()) < self._vocab_size:
            raise ValueError(f"token ids from {int(ids_T.min())} to {int(ids_T.max())}, not below {self._vocab_size}")
        return StoredText(ids_T, states_TSH)

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
        self._files, self._rows = files, rows
        texts = [self._open(ids) for ids in compared_texts(rows)]
        self._finish: Finish | None = None
        self.error, self._order = self._recognised(model, stored_layers(layers), texts)

    @torch.no_grad()
    def read(self, rows: Sequence[int]) -> tuple[Tensor]:
        """Return the states [B, T, W] of rows, with zeros after each: the final states, then `stored_layers`."""
        states = [torch.cat([self._states(ids) for ids in texts_of(self._rows, row)]) for row in rows]
        return (nn.utils.rnn.pad_sequence(states, batch_first=True),)

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
        states_TW = in_order(self._open(ids).states_TSH, self._order, self._finish)
        return nn.functional.pad(states_TW, (0, 0, 0, len(ids) - len(states_TW)))

    def _recognised(
        self, model: PreTrainedModel, layers: tuple[int, ...], texts: Sequence[StoredText]
    ) -> tuple[float, list[int]]:
        """Return the largest difference from the target's states, and the indices of the final states and of `layers`.

        vLLM stores the output of the last layer without the norm after it, which is then applied to it.
        """
        depth = text_config(model).num_hidden_layers
        nearest = nearest_layers(model, texts)
        known = {it.layer: number for number, it in enumerate(nearest) if it.known}
        shown, folder = ", ".join(map(str, nearest)), f"teacher.file={self._files.folder}"
        if not known:
            raise ConfigError(
                f"{folder}: the states are not the target's; the nearest ones are {shown}; expected a difference below "
                f"{TOLERANCE:.0%}"
            )
        if FINAL not in known and depth in known:
            self._finish, known[FINAL] = finish_of(model), known[depth]
            made = [StoredText(ids_T, in_order(every, [known[FINAL]], self._finish)[:, None]) for ids_T, every in texts]
            if [it.layer for it in nearest_layers(model, made) if it.known] != [FINAL]:
                raise ConfigError(f"{folder} holds {shown}; expected the final states, no norm of the last layer")
        missing = [layer for layer in (FINAL, *layers) if layer not in known]
        if missing:
            wanted = " and ".join(map(_named, missing))
            raise ConfigError(
                f"{folder} holds {shown}; expected {wanted} as well (the final states are layer {depth} for vLLM)"
            )
        used = [known[layer] for layer in (FINAL, *layers)]
        return max(nearest[number].error for number in used), used


def texts_of(rows: Dataset, row: int) -> list[list[int]]:
    """Return the texts of a row, of which packed ones have several."""
    found = rows[row]
    lengths = found.get("documents", len(found["input_ids"]))
    return [part.tolist() for part in torch.tensor(found["input_ids"]).split(lengths)]


def compared_texts(rows: Dataset) -> list[list[int]]:
    """Return the first text of each of a few rows."""
    step = max(1, len(rows) // COMPARED_TEXTS)
    return [texts_of(rows, row)[0] for row in range(0, len(rows), step)[:COMPARED_TEXTS]]


def in_order(states_TSH: Tensor, order: Sequence[int], finish: Finish | None) -> Tensor:
    """Return stored layers side by side [T, W] in an order that begins with the final states, or with their input."""
    final_TH, *others = states_TSH[:, order].unbind(1)
    return torch.cat([final_TH if finish is None else finish(final_TH), *others], -1)


class Nearest(NamedTuple):
    """The target's layer to which a stored one is nearest, and the difference, relative to the target's."""

    layer: int
    error: float

    @property
    def known(self) -> bool:
        """Whether the stored layer is this one."""
        return self.error < TOLERANCE

    def __str__(self) -> str:
        return f"{_named(self.layer)} ({self.error:.1%} off)"


def nearest_layers(model: PreTrainedModel, texts: Sequence[StoredText]) -> list[Nearest]:
    """Return for each stored layer the nearest one of a whole target, which reads the beginnings of the texts."""
    depth = text_config(model).num_hidden_layers
    teacher = OnlineTeacher(model, tuple(range(1, depth + 1)))
    errors_SL = torch.stack([_errors(teacher, text) for text in texts]).amax(0)
    least_S, places_S = errors_SL.min(1)
    found = zip(places_S.tolist(), least_S.tolist(), strict=True)
    return [Nearest(FINAL if place == depth else place + 1, error) for place, error in found]


def _errors(teacher: OnlineTeacher, text: StoredText) -> Tensor:
    """Return the difference [S, L] between each stored layer of a text and each of the target's."""
    ids = text.ids_T[:COMPARED_TOKENS].tolist()
    final_first_TLH = states_of(teacher, [ids])[0].float().unflatten(1, (-1, text.states_TSH.shape[-1]))
    own_TLH = final_first_TLH.roll(-1, 1)
    differences = [own_TLH - stored_TH[:, None] for stored_TH in text.states_TSH[: len(ids)].float().unbind(1)]
    return torch.stack([(it.norm(dim=-1) / own_TLH.norm(dim=-1)).median(0).values for it in differences])


def _key(ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", ids).tobytes(), digest_size=16).digest()


def _named(layer: int) -> str:
    return "the final states" if layer == FINAL else f"layer {layer}"
