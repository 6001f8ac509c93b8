"""States of recurrent layers at fixed addresses, which compiled passes read and write.

    kept     [rows, columns, ...]   inputs of a mixer since its saved states, those of the pass, unused columns
    states   [rows, ...]            the saved states

As in `recurrent_state`, a mixer reads the inputs since its saved states again, together with the next draft. All rows
read as many columns as the longest may need: what follows the tokens of a row changes nothing before them. Committed
inputs are moved into the saved states `MOST_AGAIN` at a time, in a graph of its own. A pass over one committed token
with nothing before it continues from the saved states and replaces them, which is what the target alone runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, LinearAttentionLayer

from draftsmith.decode.cache.recurrent import (
    LOCK,
    MOST_AGAIN,
    NO_CONTEXT,
    Call,
    Inputs,
    Mixer,
    Mixers,
    copied,
    each,
    mixers_of,
    replaced,
)
from draftsmith.decode.cache.rollback import keep_rows_in_place
from draftsmith.errors import ConfigError

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

    def give(self, mixer: Mixer, committed: list[int], drafted: int) -> None:
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


class CompiledMixers(Mixers):
    """The mixers of a model whose passes are compiled, all but those over prompts and other wide ones.

    Args:
        states: those that compiled passes read; `Mixer`s hold the states before and after other passes.
        advance: runs `FixedStates.advance` for the rows whose number is True.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PreTrainedConfig,
        cache: Cache,
        states: FixedStates,
        advance: Callable[[list[bool]], None],
    ) -> None:
        super().__init__(model, config, cache, states.rows)
        self._states, self._advance = states, advance
        self._committed: list[int] | None = None
        """Inputs of each row that are read again; None while `Mixer`s hold the states."""
        self._saved_roots = 0
        """Tokens of each row that are in the saved states before `keep` commits them."""

    def reading(
        self, width: int, counts: Sequence[int] | None, drafted: int = 0, *, compiled: bool = False, root: bool = False
    ) -> AbstractContextManager[None]:
        if not self._mixers:
            return NO_CONTEXT
        if compiled:
            return self._reading_fixed(width, counts, drafted, root)
        if self._committed is not None:
            for fixed, mixer in zip(self._states.mixers, self._mixers, strict=True):
                fixed.give(mixer, self._committed, drafted)
            self._committed = None
        return super().reading(width, counts)

    @contextmanager
    def _reading_fixed(self, width: int, counts: Sequence[int] | None, drafted: int, root: bool) -> Iterator[None]:
        if self._committed is None:
            pairs = zip(self._states.mixers, self._mixers, strict=True)
            rows = [fixed.take(mixer) for fixed, mixer in pairs]
            self._committed = [0] * rows[0]
        if drafted == 0:
            self._move()
        committed = self._committed
        are_committed = root or (counts is not None and min(counts) == width)
        direct = width == 1 and max(committed) == 0 and are_committed
        self.again = None if direct else [count + drafted for count in committed]
        self.most_again = 0 if direct else self._states.most_before(drafted, width)
        with self._states.reading():
            yield
        self._saved_roots = int(direct and root)
        if counts is not None and not direct:
            self._committed = [old + new for old, new in zip(committed, counts, strict=True)]

    def _move(self) -> None:
        """Move whole groups of committed inputs into the saved states."""
        assert self._committed is not None
        while max(self._committed) >= MOST_AGAIN:
            full = [count >= MOST_AGAIN for count in self._committed]
            self._advance(full)
            self._committed = [count - MOST_AGAIN * moved for count, moved in zip(self._committed, full, strict=True)]

    def keep(self, slots: Sequence[Sequence[int]]) -> None:
        if self._committed is None:
            return super().keep(slots)
        new = [len(kept) - self._saved_roots for kept in slots]
        self._committed = [old + count for old, count in zip(self._committed, new, strict=True)]

    def drop(self, rows: list[int]) -> None:
        if self._committed is None:
            return super().drop(rows)
        self._committed = [self._committed[row] for row in rows]
        for mixer in self._states.mixers:
            mixer.drop(rows)


def _tensors(states: LinearAttentionLayer) -> list[Tensor]:
    """Return the convolution and recurrent states of a layer."""
    values = [*states.conv_states.values(), *states.recurrent_states.values()]
    return [value for value in values if value is not None]


def _chosen(rows_B: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return the rows of `new` whose number is True, and the others of `old`."""
    return torch.where(rows_B.view(-1, *[1] * (new.dim() - 1)), new, old)
