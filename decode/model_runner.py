"""Runs an unmodified transformers LM on texts and draft trees, one row each, with a `RollbackCache`."""

import inspect
import weakref
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftsmith.decode.encoder_decoder import Encoded, true_positions
from draftsmith.decode.kv_cache import RollbackCache
from draftsmith.decode.masks import Attention
from draftsmith.heads.base import Tree
from draftsmith.heads.draft_tree import ROOT
from draftsmith.heads.hidden_states import Features

# Shapes: B rows, Q tokens fed to each, S slots of the cache, H hidden size, V vocabulary.


class Branches:
    """Draft nodes of one row that the cache holds after its committed tokens."""

    def __init__(self) -> None:
        self.slot: dict[int, int] = {}
        """The slot of each node, counted from the end of the committed tokens."""
        self.seen: dict[int, list[int]] = {}
        """The slots of each node's path, including its own."""
        self.depths: list[int] = []
        """The depth of the node in each slot."""
        self.is_chain = True
        """Whether every node is a child of the node read before it."""

    def add(self, node: int, parent: int, depth: int) -> None:
        slot = len(self.depths)
        self.slot[node] = slot
        self.seen[node] = [*(self.seen[parent] if parent != ROOT else ()), slot]
        self.depths.append(depth)
        self.is_chain = self.is_chain and depth == slot + 1


class ModelRunner:
    """Runs one model on several texts; the interface is `draftsmith.heads.base.ModelRunner`.

    Args:
        model: a causal LM, or an encoder-decoder model, whose encoder reads `sources` once.
        rows: number of texts.
        remember: store the input of the lm_head in `states`.
        layers: store the outputs of these layers in `features`; see `Needs.layers`.
        widths: padded width of a pass by its number of tokens, see `Costs.verify_widths`; used for one row only.
        encoded: the encoder's states [T, H] of each source; the encoder is not called then.
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
    ) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype
        self._cache = RollbackCache(model.config, rows)
        self._branches = [Branches() for _ in range(rows)]
        self._attention = Attention.of(model)
        # Flash attention takes positions that do not rise, such as those of padding, for the start of another text.
        self._widths = widths if widths and rows == 1 and not self._attention.is_flash else {}
        self._read: list[Tensor] | None = None
        if remember:
            head = model.get_output_embeddings()
            assert head is not None, "`TransformersTarget` refuses models without an lm_head"
            self._read = _watch(self, head)
        self._watched = Features(model, layers) if layers else None
        self.states: list[Tensor] = []
        """For each row, [n, H] that belong to the last logits: the lm_head's input (`remember`) or `output.states`."""
        self.features: list[Tensor] = []
        """With `layers`, the features [n, F] of the tokens last read, for each row."""
        self._encoded = Encoded(model, sources or [], encoded) if model.config.is_encoder_decoder else None
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._takes_keep = "logits_to_keep" in accepted

    @property
    def lengths(self) -> list[int]:
        """Number of committed tokens that the model has read, for each row."""
        return self._cache.lengths

    def append(self, tokens: list[list[int]], features: list[Tensor] | None = None) -> Tensor:
        """Read committed tokens and return the logits [B, V] after the last one of each row. Empty rows are skipped."""
        counts = [len(row) for row in tokens]
        starts = self.lengths
        width = max(counts)
        if starts[0] > 0:
            width = self._widths.get(width, width)
        positions = [
            [*range(start, start + count), *[start] * (width - count)]
            for start, count in zip(starts, counts, strict=True)
        ]
        # Padding follows the tokens, which do not attend to it.
        visible = None if len(set(starts)) == 1 else self._ragged_chain(starts, width)
        lasts = [max(count, 1) - 1 for count in counts]
        logits, states = self._forward(tokens, positions, visible, keep=sorted(set(lasts)), features=features)
        column = {last: place for place, last in enumerate(sorted(set(lasts)))}
        for row, count in enumerate(counts):
            self._cache.lengths[row] += count
        rows = [logits[row, column[last]] for row, last in enumerate(lasts)]
        if states is not None:
            self.states = [states[row, column[last]][None] for row, last in enumerate(lasts)]
        self._store_features(counts)
        return torch.stack(rows) if len(rows) > 1 else rows[0][None]

    def branch(
        self, trees: Sequence[Tree], nodes: list[list[int]], features: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Read draft nodes, parents before children, and return for each row the logits [n, V] after its nodes."""
        starts, tokens, positions = [], [], []
        for tree, wanted, branches, length in zip(trees, nodes, self._branches, self.lengths, strict=True):
            starts.append(length + len(branches.depths))
            for node in wanted:
                branches.add(node, tree.parents[node], tree.depths[node])
            tokens.append([tree.tokens[node] for node in wanted])
            positions.append([length + tree.depths[node] - 1 for node in wanted])
        width = max(map(len, tokens))
        width = self._widths.get(width, width)
        for row, wanted in enumerate(positions):
            wanted += [self.lengths[row]] * (width - len(wanted))
        mask = self._tree_mask(nodes, starts, width)
        logits, states = self._forward(tokens, positions, mask, starts=starts, features=features)
        if states is not None:
            self.states = [states[row, : len(wanted)] for row, wanted in enumerate(nodes)]
        self._store_features([len(wanted) for wanted in nodes])
        return [logits[row, : len(wanted)] for row, wanted in enumerate(nodes)]

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the cache entries of each row's accepted path and discard all other draft nodes."""
        for row, path in enumerate(paths):
            branches, base = self._branches[row], self.lengths[row]
            kept = [base + branches.slot[node] for node in path if node in branches.slot]
            self._cache.keep(row, kept)
            if branches.depths:
                self._branches[row] = Branches()

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows."""
        self._cache.drop(rows)
        self._branches = [self._branches[row] for row in rows]
        if self._encoded is not None:
            self._encoded.drop(rows)

    def _store_features(self, counts: list[int]) -> None:
        if self._watched is not None:
            features_BQF = self._watched.take()
            self.features = [features_BQF[row, :count] for row, count in enumerate(counts)]

    # Masks.

    def _ragged_chain(self, starts: list[int], width: int) -> Tensor:
        """Return the mask [B, Q, S] of chains after different numbers of committed tokens."""
        start_B11 = torch.tensor(starts, device=self._device)[:, None, None]
        query_Q1 = torch.arange(width, device=self._device)[:, None]
        return torch.arange(max(starts) + width, device=self._device) <= start_B11 + query_Q1

    def _tree_mask(self, nodes: list[list[int]], starts: list[int], width: int) -> Tensor | None:
        """Return the tree mask [B, Q, S], or None for chains that start at the same slot.

        Each node attends to the committed tokens and to its own path.
        """
        if len(set(starts)) == 1 and all(branches.is_chain for branches in self._branches):
            return None
        mask = torch.zeros(len(starts), width, max(starts) + width, dtype=torch.bool)
        for row, wanted in enumerate(nodes):
            base, branches = self.lengths[row], self._branches[row]
            mask[row, :, :base] = True
            for query, node in enumerate(wanted):
                mask[row, query, [base + slot for slot in branches.seen[node]]] = True
        return mask.to(self._device)

    def _slot_positions(self, end: int, positions_BQ: Tensor, starts: list[int]) -> Tensor:
        """Return the position in its text of the token in each slot, including the tokens being read: [B, S]."""
        slots_BS = torch.arange(end).expand(len(starts), end).clone()
        for row, branches in enumerate(self._branches):
            base = self.lengths[row]
            for slot, depth in enumerate(branches.depths):
                slots_BS[row, base + slot] = base + depth - 1
        slots_BS = slots_BS.to(self._device)
        for row, start in enumerate(starts):
            count = min(positions_BQ.shape[1], end - start)
            slots_BS[row, start : start + count] = positions_BQ[row, :count]
        return slots_BS

    # The forward pass.

    def _forward(
        self,
        tokens: list[list[int]],
        positions: list[list[int]],
        visible_BQS: Tensor | None,
        *,
        starts: list[int] | None = None,
        keep: list[int] | None = None,
        features: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits and, if the model has any, the states of the columns in `keep` (None: all)."""
        starts = self.lengths if starts is None else starts
        width = len(positions[0])
        if len(tokens) > 1 or len(tokens[0]) < width:
            tokens = [row + [0] * (width - len(row)) for row in tokens]
        ids = torch.tensor(tokens, device=self._device)
        positions_BQ = torch.tensor(positions, device=self._device)
        self._cache.aim(starts, width, self._device)
        end = self._cache.place.end
        mask, relative, attention = None, nullcontext(), self._attention
        is_chain = visible_BQS is None
        slides = attention.window is not None and end > attention.window and not (is_chain and attention.slides_alone)
        biased = self._encoded.biased if self._encoded is not None else []
        if slides or biased:
            positions_BS = self._slot_positions(end, positions_BQ, starts)
            if visible_BQS is None:
                visible_BQS = self._ragged_chain(starts, width)
            if biased:
                relative = true_positions(biased, positions_BQ, positions_BS)
            mask = attention.prepared(visible_BQS, positions_BQ, positions_BS, self._dtype)
        elif visible_BQS is None:
            mask = attention.chain(starts[0], width, self._device, self._dtype)
        else:
            mask = attention.plain(visible_BQS, self._dtype)
        inputs: dict[str, object] = {"use_cache": True}
        if self._takes_positions:
            inputs["position_ids"] = positions_BQ
        if self._takes_keep and keep is not None:
            inputs["logits_to_keep"] = 1 if keep == [width - 1] else torch.tensor(keep, device=self._device)
        if self._encoded is not None:
            inputs |= self._encoded.inputs(ids, mask, self._cache)
        else:
            inputs |= {"input_ids": ids, "attention_mask": mask, "past_key_values": self._cache}
        if features is not None:
            rows = [nn.functional.pad(row_nF, (0, 0, 0, width - row_nF.shape[0])) for row_nF in features]
            inputs["features"] = torch.stack(rows) if len(rows) > 1 else rows[0][None]
        with relative, attention.running(chain=is_chain):
            output = self.model(**inputs)
        logits = output.logits
        states = getattr(output, "states", None) if self._read is None else self._read[0]
        if keep is not None and logits.shape[1] != len(keep):
            logits = logits[:, keep]
            states = states[:, keep] if states is not None and states.shape[1] != len(keep) else states
        return logits, states


def _watch(runner: ModelRunner, head: nn.Module) -> list[Tensor]:
    """Return a list that holds the last input of `head`; the hook is removed when `runner` is deleted."""
    read: list[Tensor] = []

    def remember(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        read[:] = arguments[:1]

    weakref.finalize(runner, head.register_forward_pre_hook(remember).remove)
    return read
