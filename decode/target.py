"""The target: an unmodified transformers model with the operations prefill, verify and commit.

Before a model is used, `require_tree_reading` checks that its logits for a draft tree equal its logits for each path.
Architectures that derive positions from indices in the cache, ignore masks or keep state that cannot be rolled back
would give wrong texts without an error, so they are refused.
"""

import inspect
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.attention import refuse_grouped
from draftsmith.decode.kv_cache import refuse_other_layers
from draftsmith.decode.model_runner import ModelRunner
from draftsmith.decode.recurrent_state import is_recurrent
from draftsmith.decode.rollback_check import check_rollback
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.draft_tree import Draft, Parents
from draftsmith.heads.model_config import context_limit, text_config

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

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        """Return the features [n, F] of all tokens that were just read, or of the root and these draft nodes."""
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
        self.context_limit = context_limit(model.config)
        self.widths: dict[int, int] = {}
        """Padded width of a verification by its number of tokens; see `Costs.verify_widths`."""

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
            longest=max(text.max_length for text in texts),
        )
        self._counts = [len(text.tokens) for text in texts]
        return self._runner.append([text.tokens for text in texts])

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        return self._runner.tree(tokens_BQ, shapes)

    def commit(self, paths: list[list[int]]) -> None:
        self._runner.commit([[0, *(node + 1 for node in path)] for path in paths])

    def hidden(self, nodes: list[int]) -> Tensor | None:
        states = self._runner.states
        if states.dim() == 2:  # after the prefill
            return states
        if len(nodes) == 1:
            return states[:, nodes[0] + 1]
        rows_B = torch.arange(len(nodes), device=states.device)
        return states[rows_B, torch.tensor(nodes, device=states.device) + 1]

    def features(self, row: int, nodes: list[int] | None = None) -> Tensor | None:
        features_BQF = self._runner.features_BQF
        if features_BQF is None:
            return None
        if nodes is None:
            return features_BQF[row, : self._counts[row]]
        places = [0, *(node + 1 for node in nodes)]
        if places == list(range(len(places))):
            return features_BQF[row, : len(places)]
        return features_BQF[row, places]

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
    refuse_other_layers(text_config(model))
    if is_recurrent(model):
        check_rollback(model, TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE))
        return
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
    tokens_1Q = torch.tensor([[context[-1], *draft.tokens]], device=next(model.parameters()).device)
    return runner.tree(tokens_1Q, [draft.parents])[0]


def _as_path(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Return the logits [V] after `tokens` of a plain forward pass."""
    ids = torch.tensor([tokens], device=next(model.parameters()).device)
    if model.config.is_encoder_decoder:
        return model(input_ids=ids[:, :6], decoder_input_ids=ids).logits[0, -1]
    return model(input_ids=ids, use_cache=False).logits[0, -1]
