"""States of recurrent layers at fixed addresses, which compiled passes read and write.

    kept     [rows, columns, ...]   inputs of a mixer since its saved states, those of the pass, unused columns
    states   [rows, ...]            the saved states

As in `recurrent_state`, a mixer reads the inputs since its saved states again, together with the next draft. All rows
read as many columns as the longest may need: what follows the tokens of a row changes nothing before them. Committed
inputs are moved into the saved states `MOST_AGAIN` at a time, in a graph of its own. A pass over one committed token
with nothing before it continues from the saved states and replaces them, which is what the target alone runs.
"""

from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from draftsmith.decode.cache.recurrent import (
    LOCK,
    MOST_AGAIN,
    Call,
    Inputs,
    Mixer,
    copied,
    each,
    mixers_of,
    replaced,
)
from draftsmith.decode.cache.rollback import keep_rows_in_place
from draftsmith.errors import ConfigError
from draftsmith.heads.rows import Counts

MOST_KEPT = MOST_AGAIN - 1
"""Committed tokens of a row that a pass reads again: as many as `MOST_AGAIN` are moved into the saved states first."""

# Shapes: B rows, Q tokens fed, P columns that a mixer reads.


class ReadColumns:
    """Where the next pass writes a mixer's inputs; shared by all mixers of a model."""

    def __init__(self) -> None:
        self.places_BQ: Tensor | None = None
        """The column of each token; None: the tokens are committed, and nothing is read again."""
        self.width = 0
        """Columns that a mixer reads in the pass, P."""
        self.total = 0
        """Columns of `kept`."""


class FixedMixer:
    """The states of one mixer, and the function that replaces its forward method in compiled passes."""

    def __init__(self, module: nn.Module, columns: ReadColumns, cache: Cache, rows: int) -> None:
        self.module, self._columns, self._cache, self._rows = module, columns, cache, rows
        self.forward, self._names = module.forward, [*signature(module.forward).parameters]
        self._saved = LinearAttentionLayer()
        self._kept: Inputs = {}
        self._others: dict[str, Any] = {}
        """Arguments that have no value for each token."""
        self.read = self._read  # the same object in every pass, or torch would compile the pass again

    def take(self, mixer: Mixer) -> int:
        """Copy the states of a mixer, whose texts are the first rows, and return their number."""
        states = mixer.settled()
        if not self._kept:
            self._others, empty = mixer.example
            if found := [name for name, value in self._others.items() if isinstance(value, Tensor)]:
                raise ConfigError(f"compile=True: recurrent layers read {', '.join(found)}; expected compile=False")
            size = self._rows, self._columns.total
            self._saved = copied(states, [0] * self._rows)
            self._kept = {name: value.new_zeros(*size, *value.shape[2:]) for name, value in empty.items()}
            for tensor in self.tensors():
                torch._dynamo.mark_static_address(tensor)
        for value in self._kept.values():
            value.zero_()
        tensors = _tensors(states)
        for own, new in zip(self.saved(), tensors, strict=True):
            own[: len(new)] = new
        return len(tensors[0])

    def give(self, mixer: Mixer, committed: Counts, drafted: int) -> None:
        """Copy the states of the first rows to a mixer, with the inputs that they have committed and drafted."""
        rows, width = len(committed), max(committed) + drafted
        inputs = {name: value[:rows, :width].clone() for name, value in self._kept.items()} if width else {}
        mixer.receive(copied(self._saved, [*range(rows)]), inputs, committed, drafted)

    def drop(self, rows: list[int]) -> None:
        """Move these rows to the front."""
        for tensor in self.tensors():
            keep_rows_in_place(tensor, rows)

    def saved(self) -> list[Tensor]:
        """Return the saved states."""
        return _tensors(self._saved)

    def tensors(self) -> list[Tensor]:
        """Return the saved states and the inputs since then."""
        return [*self.saved(), *self._kept.values()]

    # Traced.

    def _read(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        call, states = Call(self.module, self.forward, arguments, self._cache), copied(self._saved)
        inputs = {name: arguments[name] for name in self._kept}
        places_BQ = self._columns.places_BQ
        if places_BQ is None:
            output = call(states, inputs)
            self._save(states, None)
            return output
        rows_B1 = torch.arange(self._rows, device=places_BQ.device)[:, None]
        for name, new in inputs.items():
            self._kept[name][rows_B1, places_BQ] = new
        output = call(states, {name: value[:, : self._columns.width] for name, value in self._kept.items()})
        return each(output, lambda output_BP: output_BP[rows_B1, places_BQ])

    def advance(self, full_B: Tensor) -> None:
        """Move the first `MOST_AGAIN` inputs of these rows into their saved states."""
        states = copied(self._saved)
        call = Call(self.module, self.forward, self._others, self._cache)
        call(states, {name: value[:, :MOST_AGAIN] for name, value in self._kept.items()})
        self._save(states, full_B)
        for value in self._kept.values():
            value.copy_(_chosen(full_B, value.roll(-MOST_AGAIN, 1), value))

    def _save(self, states: LinearAttentionLayer, rows_B: Tensor | None) -> None:
        for own, new in zip(self.saved(), _tensors(states), strict=True):
            own.copy_(new if rows_B is None else _chosen(rows_B, new, own))


class FixedStates:
    """The states of all mixers of a model for `rows` texts; empty for a model without recurrent layers.

    Args:
        most_width: draft tokens of one pass, or of several before the next commit.
    """

    def __init__(self, model: nn.Module, cache: Cache, rows: int, most_width: int) -> None:
        self.rows, self._columns = rows, ReadColumns()
        self._columns.total = MOST_KEPT + most_width
        with LOCK:
            self.mixers = [FixedMixer(module, self._columns, cache, rows) for module in mixers_of(model)]

    def fits(self, model: nn.Module) -> bool:
        """Return whether these are the states of the modules that the model has now, with their forward methods."""
        with LOCK:
            return [(mixer.module, mixer.forward) for mixer in self.mixers] == [
                (module, module.forward) for module in mixers_of(model)
            ]

    def most_before(self, drafted: int, width: int) -> int:
        """Return the number of columns read before `width` tokens, rounded up, since each needs its own graph."""
        rounded = 1 << (drafted - 1).bit_length() if drafted else 0
        return min(MOST_KEPT + rounded, self._columns.total - width)

    def aim(self, again_B: Tensor | None, most: int, width: int) -> None:
        """Set the columns of the next pass over `width` tokens, after `again_B` ones of each row, at most `most`.

        None: the pass reads committed tokens, with nothing before them.
        """
        self._columns.width, self._columns.places_BQ = most + width, None
        if again_B is not None:
            self._columns.places_BQ = again_B[:, None] + torch.arange(width, device=again_B.device)

    def advance(self, full_B: Tensor) -> list[Tensor]:
        """Move `MOST_AGAIN` inputs of these rows into the saved states; this is the function that is compiled."""
        for mixer in self.mixers:
            mixer.advance(full_B)
        return []

    def saved(self) -> list[Tensor]:
        """Return the states that a pass over one committed token replaces."""
        return [tensor for mixer in self.mixers for tensor in mixer.saved()]

    def tensors(self) -> list[Tensor]:
        """Return the states that `advance` replaces."""
        return [tensor for mixer in self.mixers for tensor in mixer.tensors()]

    def reading(self) -> AbstractContextManager[None]:
        """Let all mixers continue from these states, inside the context."""
        return replaced([(mixer.module, mixer.read) for mixer in self.mixers])


def _tensors(states: LinearAttentionLayer) -> list[Tensor]:
    """Return the convolution and recurrent states of a layer."""
    values = [*states.conv_states.values(), *states.recurrent_states.values()]
    return [value for value in values if value is not None]


def _chosen(rows_B: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` whose number is True, and the others of `old`."""
    return torch.where(rows_B.view(-1, *[1] * (new.dim() - 1)), new, old)
