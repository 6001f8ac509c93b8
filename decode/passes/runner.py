"""Reads sequences and their drafts with one model: the slots, depths and masks of passes of every kind."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import RollbackCache
from draftsmith.decode.passes.attention import WITH_ROLLBACK, passes_of, tree, trees
from draftsmith.decode.passes.eager import EagerPasses, RecomputingPasses
from draftsmith.decode.passes.encoder_decoder import EncoderDecoderPasses
from draftsmith.decode.passes.graphs import CompiledPasses
from draftsmith.decode.passes.plan import Output, Plan, Reading
from draftsmith.decode.passes.recurrent import RecurrentPasses, is_recurrent
from draftsmith.heads.base import Level
from draftsmith.heads.draft_tree import Parents, chain_parents
from draftsmith.heads.hidden_states import ProcessorInputs
from draftsmith.heads.rows import Columns, Counts, Rows

# Shapes: B rows, Q tokens fed to each, R draft slots, H hidden size, V vocabulary.


def passes_for(model: PreTrainedModel, rows: int, plan: Plan) -> EagerPasses:
    """Return the passes of this kind of model over `rows` sequences."""
    if plan.compile:
        return CompiledPasses(model, rows, plan)
    cache = RollbackCache(model.config, rows, next(model.parameters()).device, plan.longest)
    if passes_of(model) not in WITH_ROLLBACK:  # some leave the cache to count tokens only
        return RecomputingPasses(model, plan, cache)
    if model.config.is_encoder_decoder:
        return EncoderDecoderPasses(model, plan, cache)
    return (RecurrentPasses if is_recurrent(model) else EagerPasses)(model, plan, cache)


class ModelRunner:
    """Runs one model on several sequences; the interface is `draftsmith.heads.base.ModelRunner`."""

    def __init__(self, model: PreTrainedModel, rows: int, plan: Plan | None = None) -> None:
        self.model, self._device = model, next(model.parameters()).device
        self.passes = passes_for(model, rows, plan or Plan())
        self._drafted = 0
        """Number of draft tokens that were read after the committed ones."""
        self._depths: Tensor | None = None
        """Their depths, see `Reading`; None while they follow one another."""
        self._visible: Tensor | None = None
        """[B, n, slots]: the slots that the nodes of the last level see; None while every level has one node."""
        self.states = torch.empty(0)
        """[B, H] or [B, Q, H] that belong to the last logits: the lm_head's input (`remember`) or `output.states`."""
        self.features_BQF: Tensor | None = None
        """With `layers`, the features of the tokens last read."""

    @property
    def lengths(self) -> Counts:
        """Number of committed tokens that the model has read, for each row."""
        return self.passes.cache.lengths

    def append(self, tokens: Sequence[list[int]], features_BQF: Tensor | None = None, *, every: bool = False) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row. Empty rows are skipped.

        `every`: return the logits [B, Q, V] after every token instead.
        """
        rows = Rows.of(tokens, self._device)
        width = self.passes.padded(rows.width)
        ids_BQ = nn.functional.pad(rows.values_BW, (0, width - rows.width))
        if features_BQF is not None and width > features_BQF.shape[1]:
            features_BQF = nn.functional.pad(features_BQF, (0, 0, 0, width - features_BQF.shape[1]))
        columns = None if every else Columns(rows.counts.map(lambda count: count - 1 + (count == 0)))
        # Padding follows the tokens, which do not attend to it.
        reading = Reading(ids_BQ, self.lengths, rows.counts, features_BQF=features_BQF, columns=columns)
        output = self._keep(self.passes.read(reading))
        self.passes.cache.lengths = self.lengths + rows.counts
        if every:
            return output.logits_BQV[:, : rows.width]
        self.states = self.states if output.states_BQH is None else output.states_BQH[:, 0]
        return output.logits_BQV[:, 0]

    def read_prompts(self, tokens: list[list[int]], inputs: Sequence[ProcessorInputs | None]) -> Tensor:
        """Read whole prompts one after another, with the processor's tensors; return the logits [B, V] after them."""
        read = [self.passes.prompt(row, *each) for row, each in enumerate(zip(tokens, inputs, strict=True))]
        self.passes.cache.lengths = Counts(map(len, tokens), self._device)
        features = [one.features_BQF[0] for one in read if one.features_BQF is not None]
        self.features_BQF = nn.utils.rnn.pad_sequence(features, batch_first=True) if features else None
        states = [one.states_BQH[:, 0] for one in read if one.states_BQH is not None]
        self.states = torch.cat(states) if states else self.states
        return torch.cat([one.logits_BQV[:, 0] for one in read])

    def extend(self, level: Level, features_BnF: Tensor | None = None) -> Tensor:
        """Read the next level of draft nodes and return the logits [B, n, V] after them."""
        if level.parents_Bn is None:
            return self._branch(level.tokens_Bn, None, None, features_BnF)
        (B, n), drafted = level.tokens_Bn.shape, self._drafted
        # Each node sees the path of its parent and itself.
        own = torch.eye(n, dtype=torch.bool, device=self._device).expand(B, n, n)
        before = self._visible
        if before is None:  # a chain of one node per level so far
            before = own.new_ones(B, 1, drafted)
        visible = torch.cat([level.of_parents(before), own], 2)
        depths = torch.full((n,), level.depth, device=self._device)
        logits_BnV = self._branch(level.tokens_Bn, depths, visible, features_BnF)
        self._visible = visible
        return logits_BnV

    def line(self, tokens_BQ: Tensor, features_BQF: Tensor | None = None, columns: Columns | None = None) -> Tensor:
        """Read a line of tokens of every row as draft tokens and return the logits [B, Q, V] after them.

        `columns`: return those of some tokens only.
        """
        return self._branch(tokens_BQ, None, None, features_BQF, columns)

    def lines(self, tokens_BQ: Tensor, width: int) -> Tensor:
        """Return the logits that `line` returns, from passes over at most `width` tokens."""
        logits, states, features = [], [], []
        for part_Bq in tokens_BQ.split(width, 1):
            logits.append(self.line(part_Bq))
            states.append(self.states)
            features += [] if self.features_BQF is None else [self.features_BQF]
        self.states = torch.cat(states, 1) if states[0].dim() == 3 else self.states
        self.features_BQF = torch.cat(features, 1) if features else None  # padding follows the last part only
        return torch.cat(logits, 1)

    def block(self, tokens_Bb: Tensor, features_BCF: Tensor, counts: Sequence[int]) -> Tensor:
        """Read the features of the next `counts` committed tokens and a block of b tokens after them in one pass.

        Return the logits [B, n, V] that the model computes for the block, which is then discarded. Rows with fewer
        features are padded between features and block, with slots that the block does not see.
        """
        most, size, counts = features_BCF.shape[1], tokens_Bb.shape[1], Counts.of(counts, self._device)
        held = self.passes.block_columns(size)
        if held is not None and most > held:  # after drafts that were retrieved
            first = counts.map(lambda count: count - (count - held) * (count > held))
            self.block(tokens_Bb, features_BCF[:, :held], first)
            rest = counts.map(lambda count: (count - held) * (count > held))
            return self.block(tokens_Bb, features_BCF[:, held:], rest)
        if held is not None:
            features_BCF, most = nn.functional.pad(features_BCF, (0, 0, 0, held - most)), held
        depths = visible_B1R = None
        if held is not None or min(counts) < most:
            column_R = torch.arange(most + size, device=self._device)
            count_B1 = counts.on_device_B[:, None]
            is_block_R = column_R >= most
            depths = column_R + 1 - is_block_R * (most - count_B1)
            visible_B1R = ((column_R < count_B1) | is_block_R)[:, None]
        tokens_BQ = nn.functional.pad(tokens_Bb, (most, 0))
        logits_BnV = self._branch(tokens_BQ, depths, visible_B1R, features_BCF)
        self.commit(Rows.rising(counts))
        return logits_BnV

    def tree(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        """Read roots and the drafts after them and return the logits [B, Q, V]; `shapes`: one for each row, or one.

        Rows with fewer nodes are padded.
        """
        Q = tokens_BQ.shape[1]
        if all(shape == chain_parents(len(shape)) for shape in shapes):
            return self._branch(tokens_BQ, None, None, None)
        assert self.passes.rewinds, "`Capability` refuses branches of recurrent models"
        is_one = len(shapes) == 1
        visible, depths = tree(shapes[0], self._device) if is_one else trees(shapes, Q, self._device)
        return self._branch(tokens_BQ, depths, visible, None)

    def _branch(
        self,
        tokens_BQ: Tensor,
        depths: Tensor | None,
        visible_BQR: Tensor | None,
        features_BQF: Tensor | None,
        columns: Columns | None = None,
    ) -> Tensor:
        """Read draft tokens and return the logits [B, Q, V] after them; see `Reading`. `depths`: of these tokens."""
        Q, drafted = tokens_BQ.shape[1], self._drafted
        if depths is not None:
            before = torch.arange(1, drafted + 1, device=self._device) if self._depths is None else self._depths
            self._depths = depths = torch.cat([before, depths], -1) if drafted else depths
        more = self.passes.padded(Q) - Q
        if more:  # padding that no token attends to
            tokens_BQ = nn.functional.pad(tokens_BQ, (0, more))
            if features_BQF is not None:
                features_BQF = nn.functional.pad(features_BQF, (0, 0, 0, more))
            if visible_BQR is not None:
                visible_BQR = nn.functional.pad(visible_BQR, (0, more, 0, more))
            if depths is not None:
                depths = nn.functional.pad(depths, (0, more), value=1)
        reading = Reading(
            tokens_BQ,
            self.lengths + drafted,
            drafted=drafted,
            depths_R=depths,
            visible_BQR=visible_BQR,
            features_BQF=features_BQF,
            columns=columns,
        )
        output = self._keep(self.passes.read(reading))
        self._drafted += Q
        if more:
            output = output._replace(features_BQF=None).part(len(tokens_BQ), Q)
        self.states = self.states if output.states_BQH is None else output.states_BQH
        return output.logits_BQV

    def _keep(self, output: Output) -> Output:
        """Keep the features of a pass, and return its output."""
        if output.features_BQF is not None:
            self.features_BQF = output.features_BQF
        return output

    def commit(self, slots: Sequence[list[int]]) -> None:
        """Keep these draft slots of each row, in order, and discard all other draft tokens."""
        self.passes.keep(Rows.of(slots, self._device))
        self._drafted, self._depths, self._visible = 0, None, None

    def rewind(self, lengths: Sequence[int]) -> bool:
        """Return to these counts of tokens of each row; False if the model cannot, or rows were dropped."""
        if not self.passes.rewinds or len(lengths) != len(self.lengths):
            return False
        self.passes.cache.lengths = Counts(lengths, self._device)
        self._drafted, self._depths, self._visible = 0, None, None
        return True

    def close(self) -> None:
        """Make compiled passes available to later calls, and free cache and hooks; this runner is not used again."""
        self.passes.close()
        # Drafters keep their runner until they start again.
        del self.passes, self.states, self.features_BQF, self._depths, self._visible

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order."""
        self.passes.drop(rows)
