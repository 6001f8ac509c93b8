"""The target: an unmodified transformers model with the operations prefill, verify and commit.

Before a model is used, `require_tree_reading` checks that its logits for a draft tree equal its logits for each path.
Architectures that derive positions from indices in the cache, ignore masks or keep state that cannot be rolled back
would give wrong texts without an error, so they are refused.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.attention import refuse_grouped
from draftsmith.decode.model_runner import ModelRunner
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.draft_tree import ROOT, Draft
from draftsmith.heads.model_config import context_limit

# Shapes: B texts, N draft nodes of one text, H hidden size, V vocabulary.


class Target(Protocol):
    """The interface of a target; the exact tests implement it with toy models."""

    context_limit: int | None

    def prefill(self, texts: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        """Read all texts and return the logits [B, V] after their last tokens; keep the features of `layers`."""
        ...

    def verify(self, roots: list[int], drafts: list[Draft]) -> list[Tensor]:
        """Read the last committed token (root) and the draft of each text; return logits [N + 1, V], root first."""
        ...

    def commit(self, paths: list[list[int]]) -> None:
        """Keep the roots and the accepted nodes and discard the other nodes."""
        ...

    def hidden(self, row: int, node: int) -> Tensor | None:
        """Return the input of the lm_head [H] for the last logits of `node` (or `ROOT`); None if not available."""
        ...

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        """Return the features [n, F] of all tokens that were just read, or of the root and these draft nodes."""
        ...

    def drop(self, rows: list[int]) -> None:
        """Keep only these rows; the other texts are finished."""
        ...


@dataclass
class RootedTree:
    """A draft with its root, which is node 0 here because the target has not read it yet."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @classmethod
    def of(cls, root: int, draft: Draft) -> "RootedTree":
        return cls([root, *draft.tokens], [ROOT, *(p + 1 for p in draft.parents)], [1, *(d + 1 for d in draft.depths)])


class TransformersTarget:
    """A transformers causal LM or encoder-decoder model with a `RollbackCache`."""

    def __init__(self, model: PreTrainedModel) -> None:
        if model.get_output_embeddings() is None:
            raise ConfigError(f"model {type(model).__name__} has no lm_head; expected a causal language model")
        self.model = model
        self.context_limit = context_limit(model.config)
        self.widths: dict[int, int] = {}
        """Padded width of a verification by its number of tokens; see `Costs.verify_widths`."""

    def prefill(self, texts: Sequence[DecodeSequence], layers: tuple[int, ...] = ()) -> Tensor:
        sources = [text.source for text in texts]
        encoded = [text.encoded for text in texts if text.encoded is not None] or None
        self._runner = ModelRunner(
            self.model, len(texts), sources, remember=True, layers=layers, widths=self.widths, encoded=encoded
        )
        return self._runner.append([text.tokens for text in texts])

    def verify(self, roots: list[int], drafts: list[Draft]) -> list[Tensor]:
        trees = [RootedTree.of(root, draft) for root, draft in zip(roots, drafts, strict=True)]
        return self._runner.branch(trees, [list(range(len(tree.tokens))) for tree in trees])

    def commit(self, paths: list[list[int]]) -> None:
        self._runner.commit([[0, *(node + 1 for node in path)] for path in paths])

    def hidden(self, row: int, node: int) -> Tensor | None:
        return self._runner.states[row][node + 1]

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        if not self._runner.features:
            return None
        features_nF = self._runner.features[row]
        return features_nF if nodes is None else features_nF[[0, *(node + 1 for node in nodes)]]

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)


TOLERANCE = {torch.float64: 0.02, torch.float32: 0.02}
HALF_TOLERANCE = 0.2
"""Relative to the standard deviation of the logits: above rounding, below the effect of a wrong position or mask."""

_PASSED: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


@torch.inference_mode()
def require_tree_reading(model: PreTrainedModel) -> None:
    """Raise ConfigError, with the reason, unless logits of trees and chains equal path logits. Checked once a model.

    A model that only transformers' own attention function computes keeps that function.
    """
    if model in _PASSED:
        return
    try:
        _check_tree_reading(model)
    except ConfigError:
        if not refuse_grouped(model):
            raise
        _check_tree_reading(model)
    _PASSED[model] = True


def _check_tree_reading(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model that reads a tree or a chain of draft tokens otherwise than its paths."""
    kind = getattr(model.config, "model_type", type(model).__name__)
    if not model.config.is_encoder_decoder and "position_ids" not in inspect.signature(model.forward).parameters:
        # ALiBi for example: the difference is so small that the check below could miss it in half precision.
        raise ConfigError(
            f"model_type={kind!r} takes no position_ids: it derives positions from indices in the cache, which are "
            "wrong for the siblings of a draft tree; expected another target"
        )
    context, draft = _example(model)
    tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    try:
        logits_NV, chain_NV = (_as_tree(model, context, read) for read in (draft, draft.keep([0, 1])))
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError, NotImplementedError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model_type={kind!r} cannot read draft trees ({reason_of(error)}); expected another target"
        ) from error
    if bool(logits_NV.isnan().any()):
        dtype = str(logits_NV.dtype).removeprefix("torch.")
        raise ConfigError(
            f"model_type={kind!r} returns NaN logits in {dtype}: its weights are damaged, or overflow in that dtype; "
            "expected finite logits"
        )
    # Of the tree, children of siblings: wrong for wrong positions and for wrong masks.
    for shape, read_NV, node in (("tree", logits_NV, 1), ("tree", logits_NV, 3), ("chain", chain_NV, 1)):
        expected_V = _as_path(model, [*context, *(draft.tokens[step] for step in draft.path(node))])
        gap = float((read_NV[node + 1] - expected_V).abs().max() / expected_V.float().std().clamp_min(1e-6))
        if not gap < tolerance:
            raise ConfigError(
                f"model_type={kind!r} has other logits for a draft {shape} than for its paths (by {gap:.2g} standard "
                "deviations): it ignores the given positions or masks; expected another target"
            )


def _example(model: PreTrainedModel) -> tuple[list[int], Draft]:
    """Return random tokens, and two branches of two tokens after them."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocabulary, (10,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[:6], Draft(tuple(ids[6:]), (-1, 0, -1, 2))


def _as_tree(model: PreTrainedModel, context: list[int], draft: Draft) -> Tensor:
    """Return the logits [N + 1, V] of the root and the draft's nodes, read as a tree."""
    runner = ModelRunner(model, 1, [context])
    runner.append([context[:-1]])
    return runner.branch([RootedTree.of(context[-1], draft)], [list(range(len(draft) + 1))])[0]


def _as_path(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the logits [V] after `tokens` of a plain forward pass."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    if model.config.is_encoder_decoder:
        return model(input_ids=ids[:, :6], decoder_input_ids=ids).logits[0, -1]
    return model(input_ids=ids, use_cache=False).logits[0, -1]
