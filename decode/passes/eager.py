"""Passes of an unmodified transformers model with a `RollbackCache`."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import RollbackCache, cache_name
from draftsmith.decode.passes.base import INVARIANT_SLOTS, INVARIANT_WIDTH, Output, Plan, Positions, Reading, Seen
from draftsmith.decode.passes.masks import Attention, chains_after
from draftsmith.errors import ConfigError
from draftsmith.heads.base import DraftedChain, WantedChain
from draftsmith.heads.hidden_states import ProcessorInputs, prompt_positions
from draftsmith.heads.model_config import NO_CONTEXT, QueryScales, context_limit, is_compiled, rotary_switch, uncompiled
from draftsmith.heads.rows import Counts, Rows, rows_of

# Shapes: B rows, Q tokens fed to each, S slots of the cache, V vocabulary.


class EagerPasses:
    """Passes that `torch.compile` does not touch; other ways of running a model override single steps of them.

    Args:
        seen: the hidden states that are kept, with the hooks of compiled passes; None: with hooks of their own.
    """

    rewinds = True

    def __init__(self, model: PreTrainedModel, plan: Plan, cache: RollbackCache, seen: Seen | None = None) -> None:
        self.model, self.cache = model, cache
        self._seen = Seen(model, plan) if seen is None else seen
        parameter = next(model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self._attention, self._scales = Attention.of(model), QueryScales(model)
        self._is_plain = not self._scales and not is_compiled(model)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name, self._takes_keep = cache_name(accepted), "logits_to_keep" in accepted
        is_network = not isinstance(model, PreTrainedModel)
        self._head = None if is_network or not self._takes_keep else model.get_output_embeddings()
        positions = "decoder_position_ids" if model.config.is_encoder_decoder else "position_ids"
        self._positions_name = positions if positions in accepted else None
        self.positions = Positions(self._device, _last_position(model, plan))
        # Flash attention takes positions that do not rise, such as those of padding, for the start of another text.
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
        return count if max(self.cache.lengths) == 0 else self._widths.get(count, count)

    def prompt(self, row: int, ids: list[int], given: ProcessorInputs | None) -> Output:
        """Read a prompt with the masks that the model makes: inside an image they may be bidirectional (Gemma 3)."""
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
        if self._takes_keep:
            last = Counts([len(ids) - 1], self._device)
            arguments["logits_to_keep"] = self._kept(Reading(ids_1T, self.cache.lengths, lasts=last))
        self.cache.aim_at(row, len(ids))
        with self._watching(arguments.get(self._positions_name or "")):
            output = self.model(**arguments, use_cache=True)
        states, features = self._seen.take()
        return Output(output.logits[:, -1:], None if states is None else states[:, -1:], features)

    def read(self, reading: Reading) -> Output:
        self.cache.aim(reading.starts, reading.width)
        positions_BQ = self.positions.of(reading)
        visible_BQS = self.visible(reading)
        mask = self._mask(reading, positions_BQ, visible_BQS)
        if self.shift_B1 is not None:
            positions_BQ = positions_BQ + self.shift_B1
        inputs: dict[str, Any] = {"use_cache": True, **self._inputs(reading, mask)}
        if self._positions_name is not None:
            inputs[self._positions_name] = positions_BQ
        if self._takes_keep and reading.lasts is not None:
            inputs["logits_to_keep"] = self._kept(reading)
        if reading.features_BQF is not None:
            inputs["features"] = reading.features_BQF
        is_chain = visible_BQS is None
        with self._attention.running(chain=is_chain), self._watching(positions_BQ), self._one_logit(reading):
            return self._run(inputs, reading)

    def chain(
        self, starts: Counts, logits_BV: Tensor, wanted: WantedChain, features_BF: Tensor | None
    ) -> DraftedChain | None:
        return None

    def block_columns(self, size: int) -> int | None:
        return None

    def keep(self, slots: Rows) -> None:
        self.cache.keep(slots)

    def drop(self, rows: list[int]) -> None:
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
            return self._prepared(
                reading, positions_BQ, visible_BQS, reading.drafted.positions(end, starts, positions_BQ)
            )
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

    def _kept(self, reading: Reading) -> int | Tensor:
        """Return `logits_to_keep` for the columns of a reading.

        A number makes transformers take a view of the states, which bf16 products on a CPU read 60 times slower than a
        copy (torch 2.13): 6.7 s instead of 0.1 s for 262,144 tokens.
        """
        is_slow = self._device.type == "cpu" and self._dtype == torch.bfloat16
        is_last = reading.lasts is not None and min(reading.lasts) == reading.width - 1
        return 1 if is_last and not is_slow else reading.kept(self._device)

    def _one_logit(self, reading: Reading) -> AbstractContextManager[object]:
        """Let the lm_head read one of several columns of each row, in place of all columns that rows end at.

        The logits of a batch of prompts, which all end at different columns, would take B times as much memory.
        """
        if self._head is None or reading.lasts is None or reading.lasts.equal:
            return NO_CONTEXT
        return self._head.register_forward_pre_hook(partial(_only_column, reading))

    def _watching(self, positions_BQ: Tensor | None) -> AbstractContextManager[None]:
        """Return a context of a pass at these positions, in which hidden states are kept."""
        return self._seen.context() if self._is_plain else self._watching_scaled(positions_BQ)

    @contextmanager
    def _watching_scaled(self, positions_BQ: Tensor | None) -> Iterator[None]:
        with self._seen.context(), uncompiled(self.model), self._scales.reading(positions_BQ):
            yield


def _only_column(reading: Reading, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Replace an lm_head's input [B, n, H] by one of its columns for each row, [B, 1, H]; a forward pre-hook."""
    place, columns = reading.place, reading.columns
    assert columns is not None
    if not arguments or arguments[0].shape[:-1] != (len(place), len(columns)):
        return None
    states_BnH = arguments[0]
    return states_BnH[torch.arange(len(place), device=place.device), place.on_device_B][:, None], *arguments[1:]


def _last_position(model: PreTrainedModel, plan: Plan) -> int:
    """Return the last position of the context, or of the part of it in which rotary frequencies do not change."""
    switch = rotary_switch(model.config)
    # The last token is not read.
    is_short = switch is not None and plan.longest is not None and plan.longest <= switch + 1
    end = switch if is_short else context_limit(model.config)
    return (end or sys.maxsize) - 1
