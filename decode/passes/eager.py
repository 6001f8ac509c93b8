"""Passes of an unmodified transformers model with a `RollbackCache`."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import RollbackCache, cache_name
from draftsmith.decode.passes.attention import Attention, chains_after
from draftsmith.decode.passes.plan import (
    INVARIANT_SLOTS,
    INVARIANT_WIDTH,
    MOST_RECOMPUTED,
    Output,
    Plan,
    Reading,
    Seen,
)
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import ProcessorInputs, prompt_positions
from draftsmith.heads.model_config import NO_CONTEXT, QueryScales, context_limit, is_compiled, rotary_switch, uncompiled
from draftsmith.heads.rows import Columns, Counts, Rows, rows_of

# Shapes: B rows, Q tokens fed to each, S slots of the cache or tokens of the sequence so far, V vocabulary.


class EagerPasses:
    """Passes that `torch.compile` does not touch; other ways of running a model override single steps of them.

    Args:
        seen: the hidden states that are kept, with the hooks of compiled passes; None: with hooks of their own.
    """

    rewinds = True
    """Committed tokens can be discarded, too."""

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache, seen: Seen | None = None) -> None:
        self.model, self.cache = model, cache
        self._seen = Seen(model, plan) if seen is None else seen
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._attention, self._scales = Attention.of(model), QueryScales(model)
        self._is_plain = not self._scales and not is_compiled(model)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name, self._takes_columns = cache_name(accepted), "columns" in accepted
        is_network = not isinstance(model, PreTrainedModel)
        self._head = None if is_network else model.get_output_embeddings()
        positions = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
        self._positions_name = positions if positions in accepted else None
        self.last_position = _last_position(model, plan)
        # Flash attention takes positions that do not rise, such as those of padding, for the start of another sequence.
        is_padded = len(cache.lengths) == 1 and not self._attention.is_flash and self._takes_positions
        self._widths = plan.widths if is_padded else {}
        if plan.invariant:
            self._widths = dict.fromkeys(range(1, INVARIANT_WIDTH), INVARIANT_WIDTH)
            cache.multiple = INVARIANT_SLOTS
        self.shift_B1: Tensor | None = None
        """Position minus index of the tokens after the prompt, see `prompt_positions`; None: 0."""

    @property
    def _takes_positions(self) -> bool:
        """The model uses the positions of a pass; those of padding would else follow the tokens', maybe too far."""
        return self._positions_name is not None

    def padded(self, count: int) -> int:
        """Return the width of a pass over this number of tokens."""
        return count if max(self.cache.lengths) == 0 else self._widths.get(count, count)

    def prompt(self, row: int, ids: list[int], given: ProcessorInputs | None) -> Output:
        """Read the whole prompt of one row with a processor's tensors; the output is that of its last token.

        The model makes the masks: inside an image they may be bidirectional (Gemma 3).
        """
        ids_1T = torch.tensor([ids], device=self._device)
        positions, shift = (None, 0) if not given else prompt_positions(self.model, ids_1T, given)
        if shift and self.shift_B1 is None:
            self.shift_B1 = torch.zeros(len(self.cache.lengths), 1, dtype=torch.int64, device=self._device)
        if self.shift_B1 is not None:
            self.shift_B1[row] = shift
        arguments: dict[str, Any] = {"input_ids": ids_1T, self._cache_name: self.cache, **(given or {})}
        if self._positions_name is not None:
            plain_1T = torch.arange(len(ids), device=self._device)[None]
            arguments[self._positions_name] = plain_1T if positions is None else positions
        last = Columns(Counts([len(ids) - 1], self._device))
        self.cache.aim_at(row, len(ids))
        with self._watching(arguments.get(self._positions_name or "")), self._only(last, len(ids)):
            output = self.model(**arguments, use_cache=True)
        states, features = self._seen.take()
        return Output(output.logits[:, -1:], None if states is None else states[:, -1:], features)

    def read(self, reading: Reading) -> Output:
        """Read tokens of every row."""
        self.cache.aim(reading.starts, reading.width)
        positions_BQ = reading.positions(self.last_position)
        visible_BQS = self.visible(reading)
        mask = self._attention.of_rows(self._mask(reading, positions_BQ, visible_BQS), len(reading.starts))
        if self.shift_B1 is not None:
            positions_BQ = positions_BQ + self.shift_B1
        inputs: dict[str, Any] = {"use_cache": True, **self._inputs(reading, mask)}
        if self._positions_name is not None:
            inputs[self._positions_name] = positions_BQ
        if reading.features_BQF is not None:
            inputs["features"] = reading.features_BQF
            if self._takes_columns and reading.columns is not None:
                inputs["columns"] = reading.columns
        is_chain = visible_BQS is None
        with (
            self._attention.running(chain=is_chain),
            self._watching(positions_BQ),
            self._only(reading.columns, reading.width),
        ):
            return self._run(inputs, reading)

    def block_columns(self, size: int) -> int | None:
        """Return the columns before a block of `size` tokens, of which every pass has as many; None: any number."""
        return None

    def keep(self, slots: Rows) -> None:
        """Commit these draft slots of each row, in order, and discard all other draft tokens."""
        self.cache.keep(slots)

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.cache.drop(rows)
        if self.shift_B1 is not None:
            self.shift_B1 = rows_of(self.shift_B1, rows)

    def close(self) -> None:
        self._seen.close()

    # The steps of a pass.

    def visible(self, reading: Reading) -> Tensor | None:
        """Return the slots [B, Q, S] that each token attends to; None for chains that start at the same slot.

        Masks of one form are made for all passes whose slots are padded.
        """
        starts, width, visible_BQR = reading.starts, reading.width, reading.visible_BQR
        if visible_BQR is None:
            is_padded = self.cache.multiple > 1 and max(starts) > 0
            return chains_after(starts, width, self.cache.place.end) if is_padded or not starts.equal else None
        if starts.equal:
            committed = visible_BQR.new_ones(1, 1, reading.lengths[0]).expand(*visible_BQR.shape[:2], -1)
            return torch.cat([committed, visible_BQR], 2)
        slot_BS = torch.arange(max(starts) + width, device=self._device) - reading.lengths.on_device_B[:, None]
        R = visible_BQR.shape[2]
        index_BQS = slot_BS.clamp(0, R - 1)[:, None].expand(-1, visible_BQR.shape[1], -1)
        drafted_BQS = visible_BQR.expand(len(starts), -1, -1).gather(2, index_BQS) & (slot_BS < R)[:, None]
        return drafted_BQS | (slot_BS < 0)[:, None]

    def _mask(self, reading: Reading, positions_BQ: Tensor, visible_BQS: Tensor | None) -> Any:
        """Return the model's `attention_mask` argument."""
        attention, starts, end = self._attention, reading.starts, self.cache.place.end
        if visible_BQS is not None and attention.native:
            raise ConfigError("draft of rows of different lengths, or with branches; expected chains of equal rows")
        slides = attention.window is not None and end > attention.window
        if slides and not (visible_BQS is None and attention.slides_alone):
            return self._prepared(reading, positions_BQ, visible_BQS, reading.slot_positions(end))
        if visible_BQS is None:
            return attention.chain(starts[0], reading.width, self._device, self._dtype)
        return attention.plain(visible_BQS, self._dtype)

    def _prepared(
        self, reading: Reading, positions_BQ: Tensor, visible_BQS: Tensor | None, positions_BS: Tensor
    ) -> Any:
        """Return masks for which the positions of all slots count."""
        if visible_BQS is None:
            visible_BQS = chains_after(reading.starts, reading.width, self.cache.place.end)
        return self._attention.prepared(visible_BQS, positions_BQ, positions_BS, self._dtype)

    def _inputs(self, reading: Reading, mask: Any) -> dict[str, Any]:
        """Return the arguments that name the tokens, the mask and the cache."""
        return {"input_ids": reading.ids_BQ, "attention_mask": mask, self._cache_name: self.cache}

    def _run(self, inputs: dict[str, Any], reading: Reading) -> Output:
        """Run the model."""
        return self._output(self.model(**inputs), reading)

    def _output(self, output: Any, reading: Reading, last: int | None = None) -> Output:
        """Return the output for the columns of a reading, of which the model has read `last` columns, or only these."""
        states, features = self._seen.take(last)
        if states is None:
            states = getattr(output, "states", None)
        width = reading.width
        logits = output.logits if output.logits.shape[1] <= width else output.logits[:, -width:]
        return Output(logits, states, features).of(reading)

    def _only(self, columns: Columns | None, width: int) -> AbstractContextManager[object]:
        """Let the lm_head read these of `width` columns: logits of whole prompts would take much memory."""
        if self._head is None or columns is None or width == columns.width:
            return NO_CONTEXT
        return self._head.register_forward_pre_hook(partial(_select, columns, width))

    def _watching(self, positions_BQ: Tensor | None) -> AbstractContextManager[None]:
        """Return a context of a pass at these positions, in which hidden states are kept."""
        return self._seen.context() if self._is_plain else self._watching_scaled(positions_BQ)

    @contextmanager
    def _watching_scaled(self, positions_BQ: Tensor | None) -> Iterator[None]:
        with self._seen.context(), uncompiled(self.model), self._scales.reading(positions_BQ):
            yield


def _select(columns: Columns, width: int, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Replace an lm_head's input [B, Q, H] by some of its columns; a forward pre-hook."""
    if not arguments or arguments[0].shape[:-1] != (len(columns.first), width):
        return None
    return columns.of(arguments[0]), *arguments[1:]


def _last_position(model: PreTrainedModel, plan: Plan) -> int:
    """Return the last position of the context, or of the part of it in which rotary frequencies do not change."""
    switch = rotary_switch(model.config)
    # The last token is not read.
    is_short = switch is not None and plan.longest is not None and plan.longest <= switch + 1
    end = switch if is_short else context_limit(model.config)
    return (end or sys.maxsize) - 1


class RecomputingPasses(EagerPasses):
    """Passes of a model whose cache cannot discard draft tokens: it recomputes committed tokens with the next draft.

        own cache of the model | committed since, recomputed | draft ......... |

    Each pass continues a copy of the model's own cache, which advances after `MOST_RECOMPUTED` tokens.
    """

    rewinds = False

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache) -> None:
        super().__init__(model, plan, cache)
        assert len(cache.lengths) == 1, "`Capability` has such sequences decoded one after another"
        self._widths = {}  # padding would be recomputed, too
        self._takes_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._own_cache: Any = None
        self._cached = 0
        self._ids_1S = torch.empty(1, 0, dtype=torch.long, device=self._device)

    def _run(self, inputs: dict[str, Any], reading: Reading) -> Output:
        """Return the output for the tokens of `reading`, which are the last ones that the model computes."""
        if self._takes_keep:  # the recomputed tokens need no logits
            inputs["logits_to_keep"] = reading.width
        self._ids_1S = torch.cat([self._ids_1S[:, : reading.starts[0]], reading.ids_BQ], 1)
        length = self.cache.lengths[0]
        if length - self._cached >= MOST_RECOMPUTED:
            self._continue(inputs, length, moves=True)
        output = self._continue(inputs, self._ids_1S.shape[1], moves=reading.counts is not None)
        return self._output(output, reading, last=reading.width)

    def _continue(self, inputs: dict[str, Any], end: int, *, moves: bool) -> Any:
        """Run the model on the tokens between its cache and `end`; with `moves` the cache then holds them."""
        name = self._cache_name
        own = {key: value for key, value in inputs.items() if key != name}
        own |= {"input_ids": self._ids_1S[:, self._cached : end], "use_cache": True}
        own[name] = self._own_cache if moves else deepcopy(self._own_cache)
        if "position_ids" in inputs:
            own["position_ids"] = torch.arange(self._cached, end, device=self._device)[None]
        output = self.model(**own)
        if moves and output.get(name) is None:
            raise ValueError(f"its output has no {name!r}")
        if moves:
            self._own_cache, self._cached = output[name], end
        return output
