"""The target: an unmodified transformers model with the operations prefill, verify and commit."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.committed import at_places
from draftsmith.decode.passes.capability import ALL
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Parents, chain_parents
from draftsmith.heads.model_config import context_limit

# Shapes: B texts, N draft nodes of one text, H hidden size, V vocabulary.


class Target(Protocol):
    """The interface of a target; the exact tests implement it with toy models."""

    context_limit: int | None

    def prefill(self, texts: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        """Read all texts and return the logits [B, V] after their last tokens; keep the features of `layers`."""
        ...

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        """Read the last committed token (root) and the draft of each text; return logits [B, Q, V], root first.

        Args:
            tokens_BQ: roots and draft tokens; texts with fewer tokens are padded.
            shapes: the parents of each text's draft nodes, or one entry for all texts.
        """
        ...

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the roots and the accepted nodes and discard the other nodes."""
        ...

    def hidden(self, nodes: list[int]) -> Tensor | None:
        """Return the inputs of the lm_head [B, H] for the last logits of these nodes (or `ROOT`), one for each text.

        None if not available.
        """
        ...

    def features(self, paths: list[list[int]] | None) -> Tensor | None:
        """Return the features [B, n, F] of the roots and the nodes on these paths, or of all tokens of the prompts.

        Texts with shorter paths are padded. None if the drafter needs no features.
        """
        ...

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows, in this order; the other texts are finished."""
        ...


class TransformersTarget:
    """A transformers causal LM or encoder-decoder model with a `RollbackCache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        if model.get_output_embeddings() is None:
            raise ConfigError(f"model {type(model).__name__} has no lm_head; expected a causal language model")
        self.model = model
        self.capability = ALL
        """The drafts that `verify` accepts."""
        self.context_limit = context_limit(model.config)
        self.widths: dict[int, int] = {}
        """Padded width of a verification by its number of tokens; see `Costs.verify_widths`."""
        self.compile, self.width = False, 0
        """See `ModelRunner`."""
        self.nodes = 0
        """Slots of compiled passes for the nodes of a draft, see `MostNodes`."""

    def prefill(self, texts: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        sources = [text.source for text in texts]
        encoded = [text.encoded for text in texts if text.encoded is not None] or None
        self._runner = ModelRunner(
            self.model,
            len(texts),
            sources,
            remember=True,
            layers=layers,
            widths=self.widths,
            encoded=encoded,
            longest=max(text.max_length for text in texts) + self.nodes,
            compile=self.compile,
            width=self.width,
        )
        prompts = [text.tokens for text in texts]
        if any(text.inputs for text in texts):
            return self._runner.read_prompts(prompts, [text.inputs for text in texts])
        return self._runner.append(prompts)

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        if self.capability.no_trees and any(shape != chain_parents(len(shape)) for shape in shapes):
            raise ConfigError(self.capability.refusal("this draft"))
        return self._runner.tree(tokens_BQ, shapes)

    def commit(self, paths: list[list[int]]) -> None:
        self._runner.commit(_places(paths))

    def hidden(self, nodes: list[int]) -> Tensor | None:
        states = self._runner.states
        if states.dim() == 2:  # after the prefill
            return states
        if len(nodes) == 1:
            return states[:, nodes[0] + 1]
        rows_B = torch.arange(len(nodes), device=states.device)
        return states[rows_B, torch.tensor(nodes, device=states.device) + 1]

    def features(self, paths: list[list[int]] | None) -> Tensor | None:
        features_BQF = self._runner.features_BQF
        return features_BQF if features_BQF is None or paths is None else at_places(features_BQF, _places(paths))

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)

    def close(self) -> None:
        """Leave compiled passes to later texts, and free the cache; the next call is `prefill`."""
        if hasattr(self, "_runner"):  # not after an error before the prompt is read
            self._runner.close()
            del self._runner


def _places(paths: list[list[int]]) -> list[list[int]]:
    """Return the places of the roots and of the nodes on these paths."""
    return [[0, *(node + 1 for node in path)] for path in paths]
