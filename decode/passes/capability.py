"""The drafts that the decoder can verify with a target, measured before the target is used.

Logits of drafts are compared with those of plain forward passes over their paths. Architectures that derive positions
from indices in the cache or ignore masks would give wrong texts without an error; they verify chains only, or none.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import cache_name, refuse_other_layers
from draftsmith.decode.passes.attention import WITH_ROLLBACK, Attention, Passes, passes_of, run_with
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.checks import HALF_TOLERANCE, TOLERANCE, check_rollback
from draftsmith.decode.passes.encoder_decoder import biased_layers
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.lm_head import evaluating
from draftsmith.heads.model_config import context_limit, rotary_switch, text_config, uncompiled
from draftsmith.provenance import has_cxx_compiler

# Shapes: B texts, N draft nodes of one text, V vocabulary.

CONTEXT, DRAFT = 6, 3
"""Tokens before the draft, fewer for the other text of a batch, and tokens after them; fewer in a shorter context."""


@dataclass(frozen=True)
class Capability:
    """The drafts that the decoder verifies exactly with a model, beyond chains of one text."""

    kind: str
    """The model type."""
    no_trees: str = ""
    """Reason why it verifies chains only; empty if it verifies trees."""
    no_ragged: str = ""
    """Reason why texts of different lengths are decoded one after another; empty if they share a pass."""

    @property
    def not_compiled(self) -> str:
        """Reason why its passes are not compiled; empty if they are."""
        return self.no_ragged or self.no_trees

    def refusal(self, draft: str) -> str:
        """Return the error for a draft with branches."""
        return (
            f"{draft} has branches, and model_type={self.kind!r} reads chains only: {self.no_trees}; "
            "expected policy chain, confidence or adaptive"
        )


ALL = Capability("")
UNVERIFIED = {
    "moshi": "its logits with a cache differ from those without",
    "reformer": "its attention over long texts draws hash buckets at random",
}
"""Model types whose texts in `generate` differ from those of forward passes, beyond what the comparison reads."""
RECURRENT = "its recurrent layers read one token after the other"
COUNTS = "it takes positions from the number of tokens in the cache"
CLAIMED = 2**17
"""A number of tokens beyond those at which models change their attention (Llama 4: 8,192)."""
_AGAIN: dict[Passes, str] = {
    "copied": "each round copies its own cache and reads up to 16 committed tokens again",
    "whole": "each round reads the whole text again",
}
"""How models without rollback read drafts."""
_KNOWN: "WeakKeyDictionary[PreTrainedModel, Capability]" = WeakKeyDictionary()


@torch.inference_mode()
def capability_of(model: PreTrainedModel) -> Capability:
    """Return the drafts that the decoder can verify with `model`; measured once a model.

    The first of `Passes` that verifies most is kept for the model.

    Raises:
        ConfigError: with the reason, if chains have other logits than their paths in every way of running it.
    """
    if model in _KNOWN:
        return _KNOWN[model]
    Attention.of(model)  # other implementations are refused before all ways of running the model are tried with them
    best: tuple[Capability, Passes] | None = None
    refused: ConfigError | None = None
    ways = _ways(model)
    for passes in ways:
        if best is not None and passes not in WITH_ROLLBACK:
            break
        run_with(model, passes)
        try:
            with evaluating(model), uncompiled(model):
                found = _measured(model)
        except ConfigError as error:
            refused = error
            continue
        if best is None or _rank(found) > _rank(best[0]):
            best = found, passes
        if not found.no_ragged and (not found.no_trees or _structural(model)):
            break  # no other way can do more
    if best is None:
        assert refused is not None
        run_with(model, ways[0])  # a later call tries all of them again
        raise refused
    _KNOWN[model], passes = best
    run_with(model, passes)
    if passes in _AGAIN:
        kind = _KNOWN[model].kind
        warnings.warn(f"model_type={kind!r}: {_AGAIN[passes]}, which may take longer than `generate`", stacklevel=2)
    return _KNOWN[model]


def _ways(model: PreTrainedModel) -> Sequence[Passes]:
    if _slides_by_index(model):
        return ("native",)
    ways = WITH_ROLLBACK if model.config.is_encoder_decoder else (*WITH_ROLLBACK, *_AGAIN)
    return ways[ways.index(passes_of(model)) :]


def _rank(capability: Capability) -> tuple[bool, bool]:
    return not capability.no_trees, not capability.no_ragged


def _measured(model: PreTrainedModel) -> Capability:
    """Return the drafts that `model` verifies, run as it is now; ConfigError if not even chains."""
    kind = str(getattr(model.config, "model_type", type(model).__name__))
    if kind in UNVERIFIED:
        raise ConfigError(f"model_type={kind!r} cannot verify drafts: {UNVERIFIED[kind]}; expected another target")
    passes = passes_of(model)
    if passes != "whole" and not cache_name(inspect.signature(model.forward).parameters):
        raise ConfigError(f"model_type={kind!r} takes no cache; expected a model that reads with a cache")
    if passes in _AGAIN:
        return _read_again(model, kind, passes)
    refuse_other_layers(text_config(model))
    if is_recurrent(model):
        tolerance = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
        check_rollback(model, tolerance, 1)
        found = Capability(kind, no_trees=_structural(model))
        try:
            check_rollback(model, tolerance, 2)
        except ConfigError as error:
            return replace(found, no_ragged=str(error))
        return found
    reason = _reason(lambda: _chain_gap(model), model)
    reason = reason or _reason(lambda: _positions_gap(model), model, "in its `generate`, ")
    if reason:
        raise ConfigError(f"model_type={kind!r} cannot verify drafts: {reason}; expected another target")
    if passes == "native":
        own = "it takes its masks and positions from indices in the cache"
        return Capability(kind, no_trees=_structural(model) or own, no_ragged=own)
    trees, ragged = (
        _structural(model) or _reason(lambda: _tree_gap(model), model),
        _reason(lambda: _ragged_gap(model), model),
    )
    if not (trees and ragged) and _reason(lambda: _count_gap(model), model):
        trees, ragged = trees or COUNTS, ragged or COUNTS
    return Capability(kind, trees, ragged)


def _read_again(model: PreTrainedModel, kind: str, passes: Passes) -> Capability:
    """Return the capability of `model` without the decoder's cache, if `generate` reads texts as plain passes do."""
    if passes == "copied":
        check_rollback(model, TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE), 1)
    reason = _reason(lambda: _chain_gap(model), model)
    if reason.startswith("logits differ") and passes == "whole":
        reason = "its logits after a token depend on later tokens"
    reason = reason or _reason(lambda: _generate_gap(model), model, "in its `generate`, ")
    if reason:
        raise ConfigError(f"model_type={kind!r} cannot verify drafts: {reason}; expected another target")
    return Capability(kind, no_trees=_AGAIN[passes], no_ragged=_AGAIN[passes])


def _structural(model: PreTrainedModel) -> str:
    """Return why positions in a tree are wrong, where the code tells; in half precision numbers may not."""
    config = text_config(model)
    accepted = inspect.signature(model.forward).parameters
    if is_recurrent(model):
        return RECURRENT
    if getattr(config, "alibi", False):
        return "its ALiBi biases follow indices in the cache"
    if model.config.is_encoder_decoder:
        if "decoder_position_ids" in accepted or (passes_of(model) != "native" and biased_layers(model.get_decoder())):
            return ""
        return "it takes no decoder_position_ids: positions follow indices in the cache"
    return "" if "position_ids" in accepted else "it takes no position_ids: positions follow indices in the cache"


def _slides_by_index(model: PreTrainedModel) -> bool:
    """Return whether layers apply a window to indices in the cache, whatever the mask (GPT-Neo)."""
    return "local" in getattr(text_config(model), "attention_layers", ())


def _reason(gap: Callable[[], float], model: PreTrainedModel, where: str = "") -> str:
    """Return why the logits that `gap` compares differ, or cannot be computed; empty if they are equal.

    `where`: the first words of the reason, for logits that were not computed here.
    """
    dtype = next(model.parameters()).dtype
    try:
        found = gap()
    except ConfigError:
        raise  # it says itself what the model lacks
    except Exception as error:  # models raise errors without a common base class
        return f"{where}its forward pass over a draft fails ({reason_of(error)})"
    if found != found:
        name = str(dtype).removeprefix("torch.")
        return f"it returns NaN logits in {name}: its weights are damaged, or overflow in that dtype"
    if found < TOLERANCE.get(dtype, HALF_TOLERANCE):
        return ""
    return f"{where}logits differ from those of a plain pass by {found:.2g} standard deviations"


# The comparisons: largest difference of logits, relative to their standard deviation.


def _chain_gap(model: PreTrainedModel) -> float:
    """Compare a chain, and another one after the first was accepted in part."""
    context, (first, second, third) = _tokens(model, _context(model)), _tokens(model, DRAFT, seed=1)
    runner = _after(model, [context])
    read_NV = runner.tree(_ids(model, [[context[-1], first, second]]), [(-1, 0)])[0]
    gaps = [_gap(model, read_NV[1], [*context, first]), _gap(model, read_NV[2], [*context, first, second])]
    runner.commit([[0]])
    again_NV = runner.tree(_ids(model, [[second, third]]), [(-1,)])[0]
    return _worst([*gaps, _gap(model, again_NV[1], [*context, second, third])])


def _tree_gap(model: PreTrainedModel) -> float:
    """Compare the children of two siblings: wrong for wrong positions and for wrong masks."""
    context, tokens = _tokens(model, _context(model)), _tokens(model, 4, seed=1)
    draft = Draft(tuple(tokens), (-1, 0, -1, 2))
    read_NV = _after(model, [context]).tree(_ids(model, [[context[-1], *tokens]]), [draft.parents])[0]
    paths = {node: [*context, *(tokens[step] for step in draft.path(node))] for node in (1, 3)}
    return _worst([_gap(model, read_NV[node + 1], path) for node, path in paths.items()])


def _ragged_gap(model: PreTrainedModel) -> float:
    """Compare the chains of two texts of different lengths."""
    count, token = _context(model), _tokens(model, 1, seed=1)[0]
    contexts = [_tokens(model, count), _tokens(model, count - 2, seed=2)]
    roots = [[context[-1], token] for context in contexts]
    read_BNV = _after(model, contexts).tree(_ids(model, roots), [(-1,)])
    return _worst([_gap(model, read_BNV[row, 1], [*context, token]) for row, context in enumerate(contexts)])


def _count_gap(model: PreTrainedModel) -> float:
    """Compare a chain with the same one in a cache that claims to be longer: only positions and masks should count."""
    context, tokens = _tokens(model, _context(model)), _tokens(model, DRAFT - 1, seed=1)
    true, other = (_after(model, [context]) for _ in range(2))
    other.claim(CLAIMED)
    true_NV, other_NV = (runner.tree(_ids(model, [[context[-1], *tokens]]), [(-1, 0)])[0] for runner in (true, other))
    return float((true_NV - other_NV).abs().max() / true_NV.float().std().clamp_min(1e-6))


def _generate_gap(model: PreTrainedModel) -> float:
    """Compare the logits of the model's own `generate`, which some models give other inputs than the text."""
    context = _tokens(model, _context(model))
    ids = _ids(model, [context])
    settings: dict[str, Any] = {"max_new_tokens": DRAFT, "do_sample": False, "num_beams": 1, "output_logits": True}
    settings |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "return_dict_in_generate": True}
    output: Any = model.generate(ids, **settings)  # pyright: ignore[reportCallIssue]
    text = output.sequences[0].tolist()
    return _worst([_gap(model, logits[0], text[: len(context) + new]) for new, logits in enumerate(output.logits)])


def _positions_gap(model: PreTrainedModel) -> float:
    """Compare with `generate` where the model's own positions are not indices from 0: 0.0 where they are.

    `generate` passes indices to most of them (RoBERTa) and lets others take positions from the tokens (Kosmos-2.5).
    """
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        return 0.0
    context = _tokens(model, _context(model))
    own = _gap(model, model(input_ids=_ids(model, [context]), use_cache=False).logits[0, -1], context)
    return 0.0 if own < TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE) else _generate_gap(model)


def _worst(gaps: list[float]) -> float:
    """Return the largest number; NaN if any is NaN."""
    return float(torch.tensor(gaps).max())


def _context(model: PreTrainedModel) -> int:
    """Return the number of tokens before the drafts; ConfigError for a model that cannot read enough of them."""
    limit = context_limit(model.config) or CONTEXT + DRAFT
    if limit < DRAFT + DRAFT:
        raise ConfigError(
            f"model_type={model.config.model_type!r} reads at most {limit} tokens; expected a context of at least "
            f"{DRAFT + DRAFT}, which drafts are verified in"
        )
    return min(CONTEXT, limit - DRAFT)


def _tokens(model: PreTrainedModel, count: int, seed: int = 0) -> list[int]:
    """Return random tokens without padding, which some models do not count among the positions."""
    config, generator = text_config(model), torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (2 * count,), generator=generator).tolist()
    padding = getattr(config, "pad_token_id", None)  # RWKV's config has none
    return [token for token in tokens if token != padding][:count]


def _ids(model: PreTrainedModel, rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, device=next(model.parameters()).device)


def _after(model: PreTrainedModel, contexts: list[list[int]]) -> ModelRunner:
    """Return a runner that has read each context but its last token."""
    runner = ModelRunner(model, len(contexts), Plan(sources=[_source(model) for _ in contexts]))
    runner.append([context[:-1] for context in contexts])
    return runner


def _source(model: PreTrainedModel) -> list[int]:
    return _tokens(model, _context(model), seed=3) if model.config.is_encoder_decoder else []


def _gap(model: PreTrainedModel, read_V: Tensor, tokens: list[int]) -> float:
    """Return the difference between `read_V` and the logits after `tokens` of a plain forward pass."""
    ids = _ids(model, [tokens])
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs = {"input_ids": _ids(model, [_source(model)]), "decoder_input_ids": ids}
    elif "position_ids" in inspect.signature(model.forward).parameters:  # from 0 as in `generate`, for RoBERTa too
        inputs["position_ids"] = torch.arange(len(tokens), device=ids.device)[None]
    expected_V = model(**inputs, use_cache=False).logits[0, -1]
    return float((read_V - expected_V).abs().max() / expected_V.float().std().clamp_min(1e-6))


def require_compilable(model: PreTrainedModel, capabilities: Sequence[Capability]) -> None:
    """Raise ConfigError for a target whose passes have no fixed shape, and where no compiler is installed.

    `capabilities`: of the target and of a draft model; both have to use the positions and masks that they are given.
    """
    if model.config.is_encoder_decoder:
        raise ConfigError("compile=True with an encoder-decoder target; expected compile=False, or a decoder-only one")
    if (switch := rotary_switch(model.config)) is not None:
        raise ConfigError(f"compile=True with rotary frequencies that change at {switch}; expected compile=False")
    for capability in capabilities:
        if reason := capability.not_compiled:
            raise ConfigError(f"compile=True with model_type={capability.kind!r}: {reason}; expected compile=False")
    if Attention.of(model).is_flash:
        raise ConfigError("compile=True with flash attention, which takes no mask; expected attn_implementation=sdpa")
    device = next(model.parameters()).device.type
    if device == "cpu" and not has_cxx_compiler():
        raise ConfigError("compile=True without a C++ compiler; expected one (g++ or CXX), or compile=False")
    if device == "cuda" and find_spec("triton") is None:
        raise ConfigError("compile=True without the package triton; expected it, or compile=False")
