"""Passes that are compiled once they have fixed shapes: those after the prompt, up to a width. See `graphs.py`."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache import fixed
from draftsmith.decode.passes.base import Output, Plan, Reading, Seen
from draftsmith.decode.passes.eager import EagerPasses
from draftsmith.decode.passes.graphs import MOST_WIDTH, ChainInputs, PassInputs, give_back, in_one_layout, take_graphs
from draftsmith.decode.passes.recurrent import RecurrentPasses
from draftsmith.decode.sampling import precise
from draftsmith.heads.base import DraftedChain, WantedChain
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.rows import Counts, Rows

MOST_LAYERS = 32
"""Layers that the graph of a chain runs, counted for each token: its compilation takes as long as theirs together, and
what it saves, a call for each token, matters less the longer a pass takes."""

# Shapes: B rows, Q tokens fed to each, S slots of the cache, V vocabulary.


class CompiledPasses:
    """Compiled passes of a model, and eager ones over its prompts and over more than `MOST_WIDTH` tokens.

    Args:
        plan: `longest` determines the storage, which is allocated at once.
    """

    rewinds = True

    def __init__(self, model: PreTrainedModel, rows: int, plan: Plan) -> None:
        assert plan.longest is not None, "the storage of compiled passes is allocated at once"
        self.model, self._usual = model, plan.width
        self._graphs = take_graphs(model, rows, plan.longest)
        self.cache = self._graphs.cache
        self._seen = Seen(model, plan, self._graphs.watching, self._graphs.seen)
        self._eager = self._uncompiled(plan)

    def _uncompiled(self, plan: Plan) -> EagerPasses:
        """Return the passes that are not compiled, which share the cache."""
        return EagerPasses(self.model, plan, self.cache, self._seen)

    def padded(self, count: int) -> int:
        if max(self.cache.lengths) == 0:  # not compiled
            return count
        if count <= self._usual:
            return self._usual
        power = 1 << (count - 1).bit_length()
        return power if power <= MOST_WIDTH else count

    def _compiles(self, width: int, drafted: int) -> bool:
        """Return whether a pass of this width is compiled: after the prompt, whose pass allocates the cache."""
        is_narrow = width <= MOST_WIDTH or width == self._usual
        return is_narrow and self.cache.is_allocated and max(self.cache.lengths) > 0

    def prompt(self, row: int, ids: list[int], given: ProcessorInputs | None) -> Output:
        return self._eager.prompt(row, ids, given)

    def read(self, reading: Reading) -> Output:
        if not self._compiles(reading.width, reading.drafted.slots):
            return self._eager.read(reading)
        return self._run(reading).of(reading)

    def _run(self, reading: Reading, again: Counts | None = None, most_again: int = 0) -> Output:
        """Run a compiled pass.

        Args:
            again: columns before those of the pass in recurrent layers, at most `most_again`; see `FixedStates.aim`.
        """
        positions_BQ = visible_BQS = positions_BS = None
        if reading.visible_BQR is not None:  # else the pass counts its positions itself
            positions_BQ, visible_BQS = self._eager.positions.of(reading), self._eager.visible(reading)
            assert visible_BQS is not None
            visible_BQS = nn.functional.pad(visible_BQS, (0, self._graphs.slots - visible_BQS.shape[2]))
            visible_BQS = visible_BQS.expand(len(reading.starts), -1, -1)
            if self._graphs.attention.window is not None:
                positions_BS = reading.drafted.positions(self._graphs.slots, reading.starts, positions_BQ)
        inputs = PassInputs(
            in_one_layout(reading.ids_BQ),
            reading.starts.on_device_B,
            positions_BQ,
            visible_BQS,
            positions_BS,
            None if reading.features_BQF is None else in_one_layout(reading.features_BQF),
            None if again is None else again.on_device_B,
            self._eager.shift_B1,
        )
        return self._graphs.run(self.model, inputs, self._seen.modules, self._seen.layers, most_again)

    def chain(
        self, starts: Counts, logits_BV: Tensor, wanted: WantedChain, features_BF: Tensor | None
    ) -> DraftedChain | None:
        if not self._is_one_graph(wanted.length):
            return None
        inputs = _chain_inputs(starts, logits_BV, wanted, features_BF)
        return DraftedChain(*self._graphs.chain(self.model, inputs, wanted.length))

    def _is_one_graph(self, length: int) -> bool:
        return self._compiles(1, 0) and len(self.cache.layers) * (length - 1) <= MOST_LAYERS

    def block_columns(self, size: int) -> int | None:
        return self._usual - size if self._compiles(self._usual, 0) else None

    def keep(self, slots: Rows) -> None:
        self._eager.keep(slots)

    def drop(self, rows: list[int]) -> None:
        self._eager.drop(rows)

    def close(self) -> None:
        """Leave the graphs and their storage to later texts."""
        give_back(self.model, self._graphs)


class CompiledRecurrentPasses(CompiledPasses):
    """Compiled passes whose mixers continue from states at fixed addresses, see `cache/fixed.py`."""

    rewinds = False
    _eager: RecurrentPasses

    def __init__(self, model: PreTrainedModel, rows: int, plan: Plan) -> None:
        super().__init__(model, rows, plan)
        self._states = self._graphs.states
        self._committed: Counts | None = None
        """Inputs of each row that are read again; None while the mixers of eager passes hold the states."""
        self._saved_roots = 0
        """Tokens of each row that are in the saved states before `keep` commits them."""

    def _uncompiled(self, plan: Plan) -> EagerPasses:
        return RecurrentPasses(self.model, plan, self.cache, self._seen)

    def _compiles(self, width: int, drafted: int) -> bool:
        return max(self.cache.lengths) > 0 and drafted + width <= MOST_WIDTH

    def read(self, reading: Reading) -> Output:
        width, drafted, counts = reading.width, reading.drafted.slots, reading.counts
        if not self._compiles(width, drafted):
            self._return_states(drafted)
            return self._eager.read(reading)
        committed = self._take_states(drafted)
        are_committed = reading.root or (counts is not None and min(counts) == width)
        direct = width == 1 and max(committed) == 0 and are_committed
        with self._states.reading():
            if direct:
                output = self._run(reading)
            else:
                output = self._run(reading, committed + drafted, self._states.most_before(drafted, width))
        self._saved_roots = int(direct and reading.root)
        if counts is not None and not direct:
            self._committed = committed + counts
        return output.of(reading)

    def chain(
        self, starts: Counts, logits_BV: Tensor, wanted: WantedChain, features_BF: Tensor | None
    ) -> DraftedChain | None:
        if not self._is_one_graph(wanted.length):
            return None
        committed, self._saved_roots = self._take_states(0), 0
        inputs = _chain_inputs(starts, logits_BV, wanted, features_BF)._replace(again_B=committed.on_device_B)
        with self._states.reading():
            return DraftedChain(*self._graphs.chain(self.model, inputs, wanted.length))

    def keep(self, slots: Rows) -> None:
        if self._committed is None:
            return super().keep(slots)
        self._committed = self._committed + slots.counts + -self._saved_roots
        self.cache.keep(slots)

    def drop(self, rows: list[int]) -> None:
        if self._committed is None:
            return super().drop(rows)
        self._committed = self._committed.keep(rows)
        for mixer in self._states.mixers:
            mixer.drop(rows)
        self.cache.drop(rows)

    def _return_states(self, drafted: int) -> None:
        """Let the mixers of eager passes hold the states."""
        if self._committed is None:
            return
        for own, mixer in zip(self._states.mixers, self._eager.mixers.all, strict=True):
            own.give(mixer, self._committed, drafted)
        self._committed = None

    def _take_states(self, drafted: int) -> Counts:
        """Hold the states at fixed addresses and return the number of inputs that each row reads again.

        After a commit, whole groups of committed inputs are moved into the saved states first.
        """
        if self._committed is None:
            for own, mixer in zip(self._states.mixers, self._eager.mixers.all, strict=True):
                own.take(mixer)
            self._committed = Counts([0] * len(self.cache.lengths), self.cache.lengths.device)
        while drafted == 0 and max(self._committed) >= fixed.MOST_AGAIN:
            self._graphs.advance(self.model, self._committed.map(lambda count: count >= fixed.MOST_AGAIN).on_device_B)
            self._committed = self._committed.map(lambda count: count - fixed.MOST_AGAIN * (count >= fixed.MOST_AGAIN))
        return self._committed


def _chain_inputs(starts: Counts, logits_BV: Tensor, wanted: WantedChain, features_BF: Tensor | None) -> ChainInputs:
    temperature_B1 = None
    if wanted.uniform_BD is not None:
        dtype = precise(logits_BV[:0]).dtype
        temperature_B1 = torch.full((len(starts), 1), wanted.temperature, dtype=dtype, device=logits_BV.device)
    return ChainInputs(logits_BV, starts.on_device_B, features_BF, temperature_B1, wanted.uniform_BD)
