"""The target: an unmodified transformers model with the operations prefill, verify and commit."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.committed import at_positions
from draftsmith.decode.passes.capability import ALL, Capability
from draftsmith.decode.passes.plan import INVARIANT_WIDTH, Plan
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Parents, chain_parents
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.rows import Counts, Rows

# Shapes: B sequences, N draft nodes of one sequence, H hidden size, V vocabulary.


class TransformersTarget:
    """A transformers causal LM or encoder-decoder model. The exact tests replace it by toy models.

    Args:
        capability: the drafts that `verify` accepts.
        plan: the form of its passes; what depends on the sequences is added by `prefill`.
        nodes: slots of compiled passes for the nodes of a draft, see `MostNodes`.
    """

    def __init__(
        self, model: PreTrainedModel, capability: Capability = ALL, plan: Plan | None = None, nodes: int = 0
    ) -> None:
        require_lm_head(model)
        self.model, self._capability = model, capability
        self._plan, self._nodes = plan or Plan(), nodes
        self.context_limit = context_limit(model.config)

    def prefill(self, sequences: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        """Read all sequences and return the logits [B, V] after their last tokens; keep the features of `layers`."""
        sources = [sequence.source for sequence in sequences]
        encoded = [sequence.encoded for sequence in sequences if sequence.encoded is not None] or None
        longest = max(sequence.max_length for sequence in sequences) + self._nodes
        plan = replace(self._plan, sources=sources, encoded=encoded, remember=True, layers=layers, longest=longest)
        self._runner = ModelRunner(self.model, len(sequences), plan)
        prompts = [sequence.tokens for sequence in sequences]
        if any(sequence.inputs for sequence in sequences):
            return self._runner.read_prompts(prompts, [sequence.inputs for sequence in sequences])
        return self._runner.append(prompts)

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        """Read the last committed token (root) and the draft of each sequence; return logits [B, Q, V], root first.

        Args:
            tokens_BQ: roots and draft tokens; sequences with fewer tokens are padded.
            shapes: the parents of each sequence's draft nodes, or one entry for all sequences.
        """
        if self._capability.no_trees and any(shape != chain_parents(len(shape)) for shape in shapes):
            raise ConfigError(self._capability.refusal("this draft"))
        if self._plan.invariant:
            return self._runner.lines(tokens_BQ, INVARIANT_WIDTH)
        return self._runner.tree(tokens_BQ, shapes)

    def commit(self, paths: Sequence[list[int]]) -> None:
        """Keep the roots and the accepted nodes and discard the other nodes."""
        self._runner.commit(self._positions(paths))

    def hidden(self, nodes: Sequence[int]) -> Tensor | None:
        """Return the inputs of the lm_head [B, H] for the logits of one node (or `ROOT`) of each sequence."""
        states = self._runner.states
        if states.dim() == 2:  # after the prefill
            return states
        nodes = Counts.of(nodes, states.device)
        if nodes.equal:
            return states[:, nodes[0] + 1]
        return states[torch.arange(len(nodes), device=states.device), nodes.on_device_B + 1]

    def features(self, paths: Sequence[list[int]] | None) -> Tensor | None:
        """Return the features [B, n, F] of the roots and the nodes on these paths, or of all tokens of the prompts.

        Sequences with shorter paths are padded. None if the drafter needs no features.
        """
        features_BQF = self._runner.features_BQF
        return (
            features_BQF
            if features_BQF is None or paths is None
            else at_positions(features_BQF, self._positions(paths))
        )

    def _positions(self, paths: Sequence[list[int]]) -> Rows:
        """Return the positions of the roots and of the nodes on these paths."""
        return Rows.of(paths, next(self.model.parameters()).device).after_root

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; the other sequences are finished."""
        self._runner.drop(rows)

    def close(self) -> None:
        """Leave compiled passes to later sequences, and free the cache; the next call is `prefill`."""
        if hasattr(self, "_runner"):  # not after an error before the prompt is read
            self._runner.close()
            del self._runner


def require_lm_head(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model without logits."""
    if model.get_output_embeddings() is None:
        raise ConfigError(f"model {type(model).__name__} has no lm_head; expected a causal language model")
