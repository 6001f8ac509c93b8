"""Runs an unmodified transformers LM on texts and draft trees, one row each, with a `RollbackCache`."""

import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.cache.fixed import CompiledMixers
from draftsmith.decode.cache.recurrent import NO_CONTEXT, Mixers
from draftsmith.decode.cache.rollback import RollbackCache, cache_name
from draftsmith.decode.drafted import Depths, Drafted, Positions
from draftsmith.decode.passes.attention import WITH_ROLLBACK, passes_of
from draftsmith.decode.passes.compiled import (
    HEAD,
    MOST_LAYERS,
    MOST_WIDTH,
    ChainInputs,
    CompiledPasses,
    PassInputs,
    give_back,
    in_one_layout,
    take_passes,
)
from draftsmith.decode.passes.encoder_decoder import Encoded, biased_layers, true_positions
from draftsmith.decode.passes.masks import Attention, tree_mask, tree_masks
from draftsmith.decode.passes.reread import Reread
from draftsmith.decode.sampling import precise
from draftsmith.errors import ConfigError
from draftsmith.heads.base import DraftedChain, Level, WantedChain
from draftsmith.heads.draft_tree import Parents, chain_parents, depths_of
from draftsmith.heads.hidden_states import Watched, feature_modules
from draftsmith.heads.model_config import context_limit, is_compiled, rotary_switch, text_config, uncompiled
from draftsmith.heads.processor_inputs import ProcessorInputs, prompt_positions
from draftsmith.heads.query_scales import QueryScales

# Shapes: B rows, Q tokens fed to each, S slots of the cache, H hidden size, V vocabulary.


class ModelRunner:
    """Runs one model on several texts; the interface is `draftsmith.heads.base.ModelRunner`.

    Args:
        model: a causal LM, or an encoder-decoder model, whose encoder reads `sources` once.
        rows: number of texts.
        remember: store the input of the lm_head in `states`.
        layers: store the outputs of these layers in `features`; see `Needs.layers`.
        widths: padded width of a pass by its number of tokens, see `Costs.verify_widths`; used for one row only.
        encoded: the encoder's states [T, H] of each source; the encoder is not called then.
        longest: number of tokens of the longest text at its end, see `RollbackCache`.
        compile: compile the passes after the prompt, see `CompiledPasses`; requires `longest`, and `close` at the end.
        width: usual number of tokens of compiled passes, to which narrower ones are padded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        sources: Sequence[list[int]] | None = None,
        *,
        remember: bool = False,
        layers: tuple[int, ...] = (),
        widths: dict[int, int] | None = None,
        encoded: Sequence[Tensor] | None = None,
        longest: int | None = None,
        compile: bool = False,
        width: int = 0,
    ) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._passes: CompiledPasses | None = None
        if compile:
            assert longest is not None, "the storage of compiled passes is allocated at once"
            self._passes = take_passes(model, rows, longest)
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(accepted)
        passes = passes_of(model)  # some leave the cache to count tokens only
        self._again = None if passes in WITH_ROLLBACK else Reread(model, passes, rows)
        self._cache = RollbackCache(model.config, rows, longest) if self._passes is None else self._passes.cache
        self._usual = width
        self._mixers = self._new_mixers(text_config(model), rows)
        self._drafted = Drafted()
        self._attention = Attention.of(model)
        self._scales = QueryScales(model)
        self._is_plain = not self._scales and not is_compiled(model)
        # Flash attention takes positions that do not rise, such as those of padding, for the start of another text.
        self._widths = widths if widths and rows == 1 and not self._attention.is_flash else {}
        self._layers, self._modules = layers, feature_modules(model, layers)
        """Layers, and the lm_head, whose states are kept."""
        self._seen: dict[int, Tensor] = {} if self._passes is None else self._passes.seen
        if remember:
            head = model.get_output_embeddings()
            assert head is not None, "`TransformersTarget` refuses models without an lm_head"
            self._modules[HEAD] = Watched(head, before=True)
        watched = {} if self._passes else self._modules
        self._hooks = [
            weakref.finalize(self, module.place(module.hook(self._seen, layer)).remove)
            for layer, module in watched.items()
        ]
        self.states = torch.empty(0)
        """[B, H] or [B, Q, H] that belong to the last logits: the lm_head's input (`remember`) or `output.states`."""
        self.features_BQF: Tensor | None = None
        """With `layers`, the features of the tokens last read."""
        encodes, native = model.config.is_encoder_decoder, self._attention.native
        self._encoded = Encoded(model, sources or [], encoded) if encodes else None
        self._biased = biased_layers(model.get_decoder()) if encodes and not native else []
        switch = rotary_switch(model.config)
        is_short = switch is not None and longest is not None and longest <= switch + 1  # the last token is not read
        end = switch if is_short else context_limit(model.config)
        self._positions = Positions(self._device, (end or sys.maxsize) - 1)
        positions = "decoder_position_ids" if encodes else "position_ids"
        self._positions_name = positions if positions in accepted else None
        if self._again is not None or (self._positions_name is None and not self._biased):
            self._widths = {}  # positions of padding would follow those of the tokens, maybe beyond the context
        self._takes_keep = "logits_to_keep" in accepted
        self._shift_B1: Tensor | None = None
        """Position minus index of the tokens after the prompt, see `prompt_positions`; None: 0."""

    @property
    def lengths(self) -> list[int]:
        """Number of committed tokens that the model has read, for each row."""
        return self._cache.lengths

    def claim(self, count: int) -> None:
        """Let later passes tell the model that the cache has this number of tokens, see `capability_of`."""
        self._cache.place.claimed = count

    def append(self, tokens: list[list[int]], features_BQF: Tensor | None = None) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row. Empty rows are skipped."""
        counts = [len(row) for row in tokens]
        starts = self.lengths
        width = max(counts)
        if max(starts) > 0:
            width = self._padded(width)
        compiled = self._compiles(width)
        # Padding follows the tokens, which do not attend to it.
        visible = None if compiled or len(set(starts)) == 1 else self._ragged_chain(starts, width)
        lasts = [max(count, 1) - 1 for count in counts]
        columns = sorted(set(lasts))
        if features_BQF is not None and width > features_BQF.shape[1]:
            features_BQF = nn.functional.pad(features_BQF, (0, 0, 0, width - features_BQF.shape[1]))
        ids, positions_BQ = (
            self._ids(tokens, width),
            None if compiled else self._positions.of_text(starts, counts, width),
        )
        place_B = None  # the last token of each row, where they differ
        if len(columns) > 1:
            place_B = torch.tensor([columns.index(last) for last in lasts], device=self._device)
        one_logit = nullcontext() if compiled or place_B is None else self._one_logit(len(columns), place_B)
        with self._mixers.reading(width, counts, compiled=compiled), one_logit:
            logits, states = self._forward(ids, positions_BQ, visible, starts, columns, features_BQF)
        for row, count in enumerate(counts):
            self._cache.lengths[row] += count
        self.states = self.states if states is None else _of_rows(states, place_B)
        return _of_rows(logits, place_B)

    def _one_logit(self, columns: int, place_B: Tensor) -> AbstractContextManager[object]:
        """Let the lm_head read one of several columns of each row, in place of all columns that rows end at.

        The logits of a batch of prompts, which all end at different columns, would take B times as much memory.
        """
        head = self.model.get_output_embeddings() if isinstance(self.model, PreTrainedModel) else None
        if head is None or not self._takes_keep:
            return nullcontext()
        return head.register_forward_pre_hook(partial(_only_columns, columns, place_B))

    def _kept(self, columns: list[int], width: int) -> int | Tensor:
        """Return `logits_to_keep` for some of `width` columns.

        A number makes transformers take a view of the states, which bf16 products on a CPU read 60 times slower than a
        copy (torch 2.13): 6.7 s instead of 0.1 s for 262,144 tokens.
        """
        if columns == [width - 1] and not (self._device.type == "cpu" and self._dtype == torch.bfloat16):
            return 1
        return torch.tensor(columns, device=self._device)

    def read_prompts(self, tokens: list[list[int]], inputs: Sequence[ProcessorInputs | None]) -> Tensor:
        """Read whole prompts one after another, with the processor's tensors; return the logits [B, V] after them.

        As in `generate`, the model makes the masks itself: inside an image they may be bidirectional (Gemma 3).
        """
        logits, states, features, shifts = [], [], [], []
        for row, (ids, given) in enumerate(zip(tokens, inputs, strict=True)):
            ids_1T = self._ids([ids], len(ids))
            positions, shift = (None, 0) if not given else prompt_positions(self.model, ids_1T, given)
            shifts.append(shift)
            arguments: dict[str, Any] = {"input_ids": ids_1T, self._cache_name: self._cache, **(given or {})}
            if self._positions_name is not None:
                plain_1T = torch.arange(len(ids), device=self._device)[None]
                arguments[self._positions_name] = plain_1T if positions is None else positions
            if self._takes_keep:
                arguments["logits_to_keep"] = self._kept([len(ids) - 1], len(ids))
            self._cache.aim_at(row, len(ids))
            with self._mixers.reading(len(ids), [len(ids)]), self._watching(arguments.get(self._positions_name or "")):
                output = self.model(**arguments, use_cache=True)
            self._cache.lengths[row] = len(ids)
            logits.append(output.logits[:, -1])
            states.append(self._seen[HEAD][:, -1] if HEAD in self._modules else None)
            if self._layers:
                features.append(torch.cat([self._seen[layer] for layer in self._layers], -1)[0])
            self._seen.clear()
        self._shift_B1 = torch.tensor(shifts, device=self._device)[:, None] if any(shifts) else None
        self.features_BQF = nn.utils.rnn.pad_sequence(features, batch_first=True) if features else None
        self.states = torch.cat(states) if HEAD in self._modules else self.states
        return torch.cat(logits)

    def extend(self, level: Level, features_BnF: Tensor | None = None) -> Tensor:
        """Read the next level of draft nodes and return the logits [B, n, V] after them."""
        if level.parents_Bn is not None:
            drafted, n = self._drafted, level.tokens_Bn.shape[1]
            # Each node sees the path of its parent and itself.
            own = torch.eye(n, dtype=torch.bool, device=self._device).expand(level.tokens_Bn.shape[0], n, n)
            before = drafted.visible
            if before is None:  # a chain of one node per level so far
                before = own.new_ones(own.shape[0], 1, drafted.slots)
            drafted.visible = torch.cat([level.of_parents(before), own], 2)
            return self._branch(level.tokens_Bn, [level.depth] * n, drafted.visible, features_BnF)
        return self._branch(level.tokens_Bn, range(level.depth, level.depth + 1), None, features_BnF)

    def chain(self, logits_BV: Tensor, wanted: WantedChain, features_BF: Tensor | None = None) -> DraftedChain | None:
        """Draft a whole chain in one compiled pass after the tokens that were read; None where `extend` is as fast.

        No draft token is read after the chain until `commit`.

        Args:
            logits_BV: for the first token.
            features_BF: input of the pass over it; later passes read the `states` of the model's output.
        """
        passes, length = self._passes, wanted.length
        if passes is None or not self._compiles(1) or len(self._cache.layers) * (length - 1) > MOST_LAYERS:
            return None
        starts_B = torch.tensor(self.lengths, device=self._device)
        temperature_B1 = None
        if wanted.uniform_BD is not None:
            dtype = precise(logits_BV[:0]).dtype
            temperature_B1 = torch.full((len(starts_B), 1), wanted.temperature, dtype=dtype, device=self._device)
        inputs = ChainInputs(logits_BV, starts_B, features_BF, temperature_B1, wanted.uniform_BD)
        with self._mixers.reading(1, None, compiled=True):
            inputs = inputs._replace(again_B=self._again_before())
            return DraftedChain(*passes.chain(self.model, inputs, length))

    def line(self, tokens_BQ: Tensor, features_BQF: Tensor | None = None) -> Tensor:
        """Read a line of tokens of every row as draft tokens and return the logits [B, Q, V] after them."""
        return self._branch(tokens_BQ, range(1, tokens_BQ.shape[1] + 1), None, features_BQF)

    def block(self, tokens_Bb: Tensor, features_BCF: Tensor, counts: list[int]) -> Tensor:
        """Read the features of the next `counts` committed tokens and a block of b tokens after them in one pass.

        Return the logits [B, n, V] that the model computes for the block, which is then discarded. Rows with fewer
        features are padded between features and block, with slots that the block does not see.
        """
        most, size = features_BCF.shape[1], tokens_Bb.shape[1]
        if compiled := self._compiles(self._usual):
            held = self._usual - size
            if most > held:  # after drafts that were retrieved
                self.block(tokens_Bb, features_BCF[:, :held], [min(count, held) for count in counts])
                return self.block(tokens_Bb, features_BCF[:, held:], [max(count - held, 0) for count in counts])
            features_BCF, most = nn.functional.pad(features_BCF, (0, 0, 0, held - most)), held
        depths: Depths = range(1, most + size + 1)
        visible_B1R = None
        if compiled or min(counts) < most:
            depths = [[*range(1, most + 1), *range(count + 1, count + size + 1)] for count in counts]
            column_R = torch.arange(most + size, device=self._device)
            count_B11 = torch.tensor(counts, device=self._device)[:, None, None]
            visible_B1R = (column_R < count_B11) | (column_R >= most)
        tokens_BQ = nn.functional.pad(tokens_Bb, (most, 0))
        logits_BnV = self._branch(tokens_BQ, depths, visible_B1R, features_BCF)
        self.commit([list(range(count)) for count in counts])
        return logits_BnV

    def tree(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        """Read roots and the drafts after them and return the logits [B, Q, V]; `shapes`: one for each row, or one.

        Rows with fewer nodes are padded.
        """
        Q = tokens_BQ.shape[1]
        if all(shape == chain_parents(len(shape)) for shape in shapes):
            return self._branch(tokens_BQ, range(1, Q + 1), None, None, root=Q == 1)
        assert not self._mixers, "`Capability` refuses branches of recurrent models"
        depths = [[1, *(depth + 1 for depth in depths_of(shape))] for shape in shapes]
        if len(shapes) == 1:
            return self._branch(tokens_BQ, depths[0], tree_mask(shapes[0], self._device), None)
        padded = [row + [1] * (Q - len(row)) for row in depths]
        return self._branch(tokens_BQ, padded, tree_masks(shapes, Q, self._device), None)

    def _branch(
        self,
        tokens_BQ: Tensor,
        depths: Depths,
        visible_BQR: Tensor | None,
        features_BQF: Tensor | None,
        *,
        root: bool = False,
    ) -> Tensor:
        """Read draft tokens and return the logits [B, Q, V] after them.

        Args:
            visible_BQR: the draft slots that each token sees, R - Q earlier ones and its own Q; None: all up to itself.
            root: the only token is the last one of its text.
        """
        Q, lengths, drafted = tokens_BQ.shape[1], self._cache.lengths, self._drafted
        starts = [length + drafted.slots for length in lengths]
        width = self._padded(Q)
        compiled = self._compiles(width)
        if width > Q:  # padding that no token attends to
            tokens_BQ = nn.functional.pad(tokens_BQ, (0, width - Q))
            if features_BQF is not None:
                features_BQF = nn.functional.pad(features_BQF, (0, 0, 0, width - Q))
            if visible_BQR is not None:
                visible_BQR = nn.functional.pad(visible_BQR, (0, width - Q, 0, width - Q))
        is_plain = compiled and visible_BQR is None  # the pass counts its positions itself
        mask = None if is_plain else self._draft_mask(visible_BQR, starts, width)
        positions_BQ = None if is_plain else self._positions.of_draft(lengths, starts, depths, width)
        with self._mixers.reading(width, None, drafted.slots, compiled=compiled, root=root):
            logits, states = self._forward(tokens_BQ, positions_BQ, mask, starts, None, features_BQF)
        drafted.read(Q, depths)
        if states is not None:
            self.states = states[:, :Q] if width > Q else states
        return logits[:, :Q] if width > Q else logits

    def commit(self, slots: list[list[int]]) -> None:
        """Keep these draft slots of each row, in order, and discard all other draft tokens."""
        self._mixers.keep(slots)
        self._cache.keep(slots)
        self._drafted = Drafted()

    def rewind(self, lengths: list[int]) -> bool:
        """Go back to these numbers of tokens of each row; False if the model cannot, or rows were dropped."""
        if self._mixers or self._again is not None or len(lengths) != len(self.lengths):
            return False
        self._cache.lengths, self._drafted = list(lengths), Drafted()
        return True

    def close(self) -> None:
        """Leave compiled passes to later texts, and free the cache and the hooks; this runner is not used again."""
        for remove in self._hooks:  # or compiled passes of a drafter that shares the lm_head would run them
            remove()
        if self._passes is not None:
            give_back(self.model, self._passes)
        vars(self).clear()  # drafters keep their runner until they start again

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self._cache.drop(rows)
        self._mixers.drop(rows)
        if self._shift_B1 is not None:
            self._shift_B1 = self._shift_B1[rows]
        if self._encoded is not None:
            self._encoded.drop(rows)

    def _padded(self, count: int) -> int:
        """Return the width of a pass over this number of tokens after others."""
        if self._passes is None:
            return self._widths.get(count, count)
        if max(self.lengths) == 0:  # not compiled
            return count
        if count <= self._usual:
            return self._usual
        power = 1 << (count - 1).bit_length()
        return power if power <= MOST_WIDTH else count

    def _compiles(self, width: int) -> bool:
        """Return whether a pass of this width is compiled: after the prompt, whose pass allocates the cache."""
        if self._passes is None or not (self._cache.is_allocated or self._mixers) or max(self.lengths) == 0:
            return False
        if self._mixers:
            return self._drafted.slots + width <= MOST_WIDTH
        return width <= MOST_WIDTH or width == self._usual

    def _ids(self, rows: list[list[int]], width: int) -> Tensor:
        """Return rows of at most `width` numbers as [B, width], padded with 0."""
        wide = [row if len(row) == width else row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(wide, device=self._device)

    # Masks.

    def _ragged_chain(self, starts: list[int], width: int) -> Tensor:
        """Return the mask [B, Q, S] of chains after different numbers of committed tokens."""
        start_B11 = torch.tensor(starts, device=self._device)[:, None, None]
        query_Q1 = torch.arange(width, device=self._device)[:, None]
        return torch.arange(max(starts) + width, device=self._device) <= start_B11 + query_Q1

    def _draft_mask(self, visible_BQR: Tensor | None, starts: list[int], width: int) -> Tensor | None:
        """Return the mask [B, Q, S] of draft tokens, or None for chains that start at the same slot.

        Each token attends to the committed tokens and to the draft slots in `visible_BQR`.
        """
        equal = min(starts) == max(starts)
        if visible_BQR is None:
            return None if equal else self._ragged_chain(starts, width)
        if equal:
            committed = visible_BQR.new_ones(1, 1, self.lengths[0]).expand(*visible_BQR.shape[:2], -1)
            return torch.cat([committed, visible_BQR], 2)
        length_B1 = torch.tensor(self.lengths, device=self._device)[:, None]
        slot_BS = torch.arange(max(starts) + width, device=self._device) - length_B1
        R = visible_BQR.shape[2]
        index_BQS = slot_BS.clamp(0, R - 1)[:, None].expand(-1, visible_BQR.shape[1], -1)
        drafted_BQS = visible_BQR.expand(len(starts), -1, -1).gather(2, index_BQS) & (slot_BS < R)[:, None]
        return drafted_BQS | (slot_BS < 0)[:, None]

    # The forward pass.

    def _forward(
        self,
        ids_BQ: Tensor,
        positions_BQ: Tensor | None,
        visible_BQS: Tensor | None,
        starts: list[int],
        keep: list[int] | None,
        features_BQF: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits and, if the model has any, the states of the columns in `keep` (None: all)."""
        width = ids_BQ.shape[1]
        if self._compiles(width):
            logits, states = self._run_compiled(ids_BQ, positions_BQ, visible_BQS, starts, features_BQF)
            return _columns(logits, states, keep)
        assert positions_BQ is not None, "compiled passes only count their positions"
        self._cache.aim(starts, width, self._device)
        end = self._cache.place.end
        mask, relative, attention = None, NO_CONTEXT, self._attention
        is_chain = visible_BQS is None
        slides = attention.window is not None and end > attention.window and not (is_chain and attention.slides_alone)
        if not is_chain and attention.native:
            raise ConfigError("draft of rows of different lengths, or with branches; expected chains of equal rows")
        if slides or self._biased:
            positions_BS = self._drafted.positions(end, positions_BQ, starts)
            if visible_BQS is None:
                visible_BQS = self._ragged_chain(starts, width)
            if self._biased:
                relative = true_positions(self._biased, positions_BQ, positions_BS)
            mask = attention.prepared(visible_BQS, positions_BQ, positions_BS, self._dtype)
        elif visible_BQS is None:
            mask = attention.chain(starts[0], width, self._device, self._dtype)
        else:
            mask = attention.plain(visible_BQS, self._dtype)
        inputs: dict[str, Any] = {"use_cache": True}
        if self._shift_B1 is not None:
            positions_BQ = positions_BQ + self._shift_B1
        if self._positions_name is not None:
            inputs[self._positions_name] = positions_BQ
        if self._takes_keep and keep is not None:
            inputs["logits_to_keep"] = self._kept(keep, width)
        if self._encoded is not None:
            inputs |= self._encoded.inputs(ids_BQ, mask, self._cache)
        else:
            inputs |= {"input_ids": ids_BQ, "attention_mask": mask, self._cache_name: self._cache}
        if features_BQF is not None:
            inputs["features"] = features_BQF
        seen = self._seen
        with relative, attention.running(chain=is_chain), self._watching(positions_BQ):
            if self._again is None:
                output = self.model(**inputs)
            else:  # whose last columns are the new tokens'
                output = self._again.read(inputs, starts[0], self.lengths[0], committed=keep is not None)
                seen.update({layer: states[:, -width:] for layer, states in seen.items()})
        if self._layers:
            self.features_BQF = torch.cat([seen[layer] for layer in self._layers], -1)
        states = seen[HEAD] if HEAD in self._modules else getattr(output, "states", None)
        seen.clear()
        logits = output.logits if output.logits.shape[1] <= width else output.logits[:, -width:]
        return _columns(logits, states, keep)

    def _run_compiled(
        self,
        ids_BQ: Tensor,
        positions_BQ: Tensor | None,
        visible_BQS: Tensor | None,
        starts: list[int],
        features_BQF: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits and states of a compiled pass; without positions, tokens are a line after `starts`."""
        passes, positions_BS = self._passes, None
        assert passes is not None
        if visible_BQS is not None:
            assert positions_BQ is not None
            visible_BQS = nn.functional.pad(visible_BQS, (0, passes.slots - visible_BQS.shape[2]))
            visible_BQS = visible_BQS.expand(len(starts), -1, -1)
            if self._attention.window is not None:
                positions_BS = self._drafted.positions(passes.slots, positions_BQ, starts)
        starts_B = torch.tensor(starts, device=self._device)
        features_BQF = None if features_BQF is None else in_one_layout(features_BQF)
        ids_BQ, again_B = in_one_layout(ids_BQ), self._again_before()
        inputs = PassInputs(
            ids_BQ, starts_B, positions_BQ, visible_BQS, positions_BS, features_BQF, again_B, self._shift_B1
        )
        output = passes.run(self.model, inputs, self._modules, self._layers, self._mixers.most_again)
        self.features_BQF = output.features_BQF
        return output.logits_BQV, output.states_BQH

    def _watching(self, positions_BQ: Tensor | None) -> AbstractContextManager[None]:
        """Return a context of a pass at these positions, in which `_seen` is filled."""
        if not self._is_plain:
            return self._watching_scaled(positions_BQ)
        return NO_CONTEXT if self._passes is None else self._passes.watching(self._modules)

    @contextmanager
    def _watching_scaled(self, positions_BQ: Tensor | None) -> Iterator[None]:
        watching = NO_CONTEXT if self._passes is None else self._passes.watching(self._modules)
        with watching, uncompiled(self.model), self._scales.reading(positions_BQ):
            yield

    def _again_before(self) -> Tensor | None:
        """Return `again_B` of the compiled pass that follows."""
        again = self._mixers.again
        return None if again is None else torch.tensor(again, device=self._device)

    def _new_mixers(self, config: PreTrainedConfig, rows: int) -> Mixers:
        model, passes = self.model, self._passes
        if passes is not None:
            return CompiledMixers(model, config, self._cache, passes.states, partial(passes.advance, model))
        return Mixers(nn.Module() if self._again else model, config, self._cache, rows)


def _only_columns(count: int, place_B: Tensor, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Replace an lm_head's input [B, count, H] by one of its columns for each row, [B, 1, H]; a forward pre-hook."""
    if not arguments or arguments[0].shape[:-1] != (len(place_B), count):
        return None
    return _of_rows(arguments[0], place_B)[:, None], *arguments[1:]


def _of_rows(values_BQX: Tensor, place_B: Tensor | None) -> Tensor:
    """Return the column of each row at these places [B, X]; with one column, which has been selected before, that."""
    if place_B is None or values_BQX.shape[1] == 1:
        return values_BQX[:, 0]
    return values_BQX[torch.arange(len(place_B), device=place_B.device), place_B]


def _columns(logits_BQV: Tensor, states_BQH: Tensor | None, keep: list[int] | None) -> tuple[Tensor, Tensor | None]:
    """Return logits and states of the columns in `keep`, which the model may have selected; None: all of them.

    Logits of one column in place of several are those of `_one_logit`.
    """
    if keep is not None and logits_BQV.shape[1] not in (1, len(keep)):
        logits_BQV = logits_BQV[:, keep]
        if states_BQH is not None and states_BQH.shape[1] not in (1, len(keep)):
            states_BQH = states_BQH[:, keep]
    return logits_BQV, states_BQH
