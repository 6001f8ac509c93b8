"""The types that all ways of running a model share: a reading, its output, positions.

Each way has a class and a file of its own, `EagerPasses` or one derived from it, and `passes_for` chooses one.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.heads.hidden_states import Watched, feature_modules
from draftsmith.heads.model_config import NO_CONTEXT
from draftsmith.heads.rows import Columns, Counts

HEAD = 0
"""Key of the lm_head's input among the tensors that hooks keep; layers are counted from 1."""

INVARIANT_WIDTH, INVARIANT_SLOTS = 8, 64
"""Tokens of each pass with `Plan.invariant`, and the number of which the slots that it attends to are a multiple."""

MOST_RECOMPUTED = 16
"""Committed tokens that are recomputed where states cannot discard draft tokens: more widen the passes, fewer move the
saved states on more often."""

# Shapes: B rows, Q tokens fed to each, R draft slots, S slots of the cache, H hidden size, F size of the features of a
# token, V vocabulary.


@dataclass(frozen=True, eq=False)
class Plan:
    """The form of a runner's passes, and what is kept of them."""

    sources: Sequence[list[int]] = ()
    """The tokens of each encoder, for an encoder-decoder model."""
    encoded: Sequence[Tensor] | None = None
    """The encoder's states [T, H] of each source; the encoder is not called then."""
    remember: bool = False
    """Keep the input of the lm_head as `states`."""
    layers: tuple[int, ...] = ()
    """Keep the outputs of these layers as features; see `Needs.layers`."""
    widths: dict[int, int] = field(default_factory=dict)
    """Padded width of a pass by its number of tokens, see `Costs.verify_widths`; used for one row only."""
    longest: int | None = None
    """Number of tokens of the longest sequence at its end, see `RollbackCache`."""
    compile: bool = False
    """Compile the passes after the prompt; requires `longest`, and `close` at the end."""
    width: int = 0
    """Usual number of tokens of compiled passes, to which narrower ones are padded."""
    invariant: bool = False
    """Every pass after the prompt has one shape, so that logits do not depend on the index of a token in its pass."""


@dataclass(frozen=True, eq=False)
class Reading:
    """The tokens of one pass, with padding on the right."""

    ids_BQ: Tensor
    starts: Counts
    """The slot of the first token of each row."""
    counts: Counts | None = None
    """Number of tokens of each row, which are committed; None: draft tokens."""
    drafted: int = 0
    """Number of draft tokens before them, in the same slots for every row."""
    depths_R: Tensor | None = None
    """Number of draft tokens on the path to each in the draft slots up to the last one read, [R] or [B, R]; None where
    they follow one another."""
    visible_BQR: Tensor | None = None
    """The draft slots that each token sees, R - Q earlier ones and its own Q; None: all up to itself."""
    features_BQF: Tensor | None = None
    columns: Columns | None = None
    """Those whose logits are returned; None: all."""

    @property
    def width(self) -> int:
        return self.ids_BQ.shape[1]

    @property
    def lengths(self) -> Counts:
        """Number of committed tokens before these."""
        return self.starts + -self.drafted if self.drafted else self.starts

    def positions(self, last: int) -> Tensor:
        """Return the positions [B, Q] of the tokens; padding has none beyond `last`, the last one of the context."""
        starts, width, device = self.starts, self.width, self.starts.device
        if self.depths_R is not None:
            positions_BQ = self.lengths.on_device_B[:, None] - 1 + self.depths_R[..., -width:]
        elif starts.equal:
            positions_BQ = torch.arange(starts[0], starts[0] + width, device=device).expand(len(starts), -1)
        else:
            positions_BQ = starts.on_device_B[:, None] + torch.arange(width, device=device)
        return positions_BQ.clamp(max=last) if max(starts) + width - 1 > last else positions_BQ

    def slot_positions(self, end: int) -> Tensor:
        """Return the position in its sequence of the token in each slot up to `end`, [B, S]."""
        device, rows = self.starts.device, len(self.starts)
        slots_BS = torch.arange(end + self.width, device=device).repeat(rows, 1)  # padding may end after the last slot
        if self.depths_R is not None:
            first_B1 = self.lengths.on_device_B[:, None]
            draft_slots_BR = first_B1 + torch.arange(self.depths_R.shape[-1], device=device)
            slots_BS.scatter_(1, draft_slots_BR, (first_B1 - 1 + self.depths_R).expand(rows, -1))
        return slots_BS[:, :end]


class Output(NamedTuple):
    """Output of a pass for every token, or for some columns of each row; states where they are asked for."""

    logits_BQV: Tensor
    states_BQH: Tensor | None
    features_BQF: Tensor | None = None
    """Of every token."""

    def part(self, rows: int, width: int) -> "Output":
        """Return the output of the first rows and tokens."""
        return Output._make(None if x is None else x[:rows, :width] for x in self)

    def of(self, reading: Reading) -> "Output":
        """Return the output of the columns that a reading names, where it does; the model may have selected them."""
        columns, states = reading.columns, self.states_BQH
        if columns is None:
            return self
        states = None if states is None else columns.of(states)
        return self._replace(logits_BQV=columns.of(self.logits_BQV), states_BQH=states)


class Seen:
    """The hidden states that hooks keep during a pass: the lm_head's input and the outputs of layers.

    Args:
        during: returns the context of a pass, in which the hooks of these modules are placed, and the tensors that they
            keep; None: the hooks are placed now and stay until `close`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        during: "Callable[[dict[int, Watched]], AbstractContextManager[None]] | None" = None,
        kept: dict[int, Tensor] | None = None,
    ) -> None:
        self.layers, self.modules = plan.layers, feature_modules(model, plan.layers)
        self._kept: dict[int, Tensor] = {} if kept is None else kept
        if plan.remember:
            head = model.get_output_embeddings()
            assert head is not None, "`TransformersTarget` refuses models without an lm_head"
            self.modules[HEAD] = Watched(head, before=True)
        self._during = during
        watched = {} if during else self.modules
        self._hooks = [
            weakref.finalize(self, module.register(module.hook(self._kept, layer)).remove)
            for layer, module in watched.items()
        ]

    def context(self) -> AbstractContextManager[None]:
        """Return the context of a pass, after which `take` returns its states."""
        return NO_CONTEXT if self._during is None else self._during(self.modules)

    def take(self, last: int | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Return (the lm_head's input, the features) of the pass, of its `last` columns; None for what is not kept."""
        kept = self._kept if last is None else {layer: x[:, -last:] for layer, x in self._kept.items()}
        states = kept[HEAD] if HEAD in self.modules else None
        features = torch.cat([kept[layer] for layer in self.layers], -1) if self.layers else None
        self._kept.clear()
        return states, features

    def close(self) -> None:
        """Remove the hooks, which compiled passes of a drafter that shares the lm_head would run."""
        for remove in self._hooks:
            remove()
