"""The drafts that the decoder can verify with a target, measured before the target is used.

Logits of drafts are compared with those of plain forward passes over their paths. Architectures that derive positions
from indices in the cache or ignore masks would give wrong texts without an error; they verify chains only, or none.
"""

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache.rollback import cache_name, refuse_other_layers
from draftsmith.decode.passes.attention import WITH_ROLLBACK, Attention, Passes, passes_of, run_with
from draftsmith.decode.passes.checks import (
    DRAFT,
    MANY_ROUNDS,
    ROUNDS,
    context_of,
    difference,
    ids_of,
    plain_logits,
    random_tokens,
    reader,
    rollback_gap,
    tolerance_of,
    why_wrong,
)
from draftsmith.decode.passes.encoder_decoder import biased_layers
from draftsmith.decode.passes.recurrent import is_recurrent
from draftsmith.errors import ConfigError
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.lm_head import evaluating
from draftsmith.heads.model_config import require_in_memory, rotary_switch, text_config, uncompiled
from draftsmith.provenance import has_cxx_compiler

# Shapes: B sequences, N draft nodes of one sequence, V vocabulary.


@dataclass(frozen=True)
class Capability:
    """The drafts that the decoder verifies exactly with a model, beyond chains of one sequence."""

    kind: str
    """The model type."""
    no_trees: str = ""
    """Reason why it verifies chains only; empty if it verifies trees."""
    no_ragged: str = ""
    """Reason why sequences of different lengths are decoded one after another; empty if they share a pass."""

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
COPIED = "each round copies its own cache and recomputes up to 16 committed tokens"
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
    require_in_memory(model)
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
    if passes == "copied":
        kind = _KNOWN[model].kind
        warnings.warn(f"model_type={kind!r}: {COPIED}, which may take longer than `generate`", stacklevel=2)
    return _KNOWN[model]


def _ways(model: PreTrainedModel) -> Sequence[Passes]:
    if _slides_by_index(model):
        return ("native",)
    ways = WITH_ROLLBACK if model.config.is_encoder_decoder else (*WITH_ROLLBACK, "copied")
    return ways[ways.index(passes_of(model)) :]


def _rank(capability: Capability) -> tuple[bool, bool]:
    return not capability.no_trees, not capability.no_ragged


def _measured(model: PreTrainedModel) -> Capability:
    """Return the drafts that `model` verifies, run as it is now; ConfigError if not even chains."""
    kind = str(getattr(model.config, "model_type", type(model).__name__))
    if kind in UNVERIFIED:
        raise ConfigError(f"model_type={kind!r} cannot verify drafts: {UNVERIFIED[kind]}; expected another target")
    passes = passes_of(model)
    if not cache_name(inspect.signature(model.forward).parameters):
        raise ConfigError(f"model_type={kind!r} takes no cache; expected a model that reads with a cache")
    if passes in WITH_ROLLBACK:
        refuse_other_layers(text_config(model))
    rounds = MANY_ROUNDS if passes == "copied" or is_recurrent(model) else ROUNDS
    reason = why_wrong(lambda: rollback_gap(model, 1, rounds), model)
    of_generate = _generate_gap if passes == "copied" else _positions_gap
    reason = reason or why_wrong(lambda: of_generate(model), model, "in its `generate`, ")
    if reason:
        raise ConfigError(f"model_type={kind!r} cannot verify drafts: {reason}; expected another target")
    if passes == "copied":
        return Capability(kind, no_trees=COPIED, no_ragged=COPIED)
    if passes == "native":
        own = "it takes its masks and positions from indices in the cache"
        return Capability(kind, no_trees=_structural(model) or own, no_ragged=own)
    no_batches = why_wrong(lambda: rollback_gap(model, 2, rounds), model)
    if trees := _structural(model) or why_wrong(lambda: _tree_gap(model, 2), model):
        of_two, trees = trees, _structural(model) or why_wrong(lambda: _tree_gap(model, 1), model)
        no_batches = no_batches or ("" if trees else of_two)
    return Capability(kind, trees, no_batches)


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


def _tree_gap(model: PreTrainedModel, rows: int) -> float:
    """Compare the children of two siblings after texts of one length: wrong for wrong positions and for wrong masks."""
    contexts = [random_tokens(model, context_of(model), seed=2 * row) for row in range(rows)]
    tokens = random_tokens(model, 4, seed=1)
    draft = Draft(tuple(tokens), (-1, 0, -1, 2))
    runner = reader(model, [context[:-1] for context in contexts])
    read_BNV = runner.tree(ids_of(model, [[context[-1], *tokens] for context in contexts]), [draft.parents])
    paths = [[*text, *(tokens[step] for step in draft.path(node))] for text in contexts for node in (1, 3)]
    return float(difference(read_BNV[:, [2, 4]].flatten(0, 1), plain_logits(model, paths)[:, -1]))


def _generate_gap(model: PreTrainedModel) -> float:
    """Compare the logits of the model's own `generate`, which some models give other inputs than the text."""
    ids = ids_of(model, [random_tokens(model, context_of(model))])
    settings: dict[str, Any] = {"max_new_tokens": DRAFT, "do_sample": False, "num_beams": 1, "output_logits": True}
    settings |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "return_dict_in_generate": True}
    output: Any = model.generate(ids, **settings)  # pyright: ignore[reportCallIssue]
    read_NV = torch.cat(output.logits)
    return float(difference(read_NV, plain_logits(model, output.sequences.tolist())[0, -1 - len(read_NV) : -1]))


def _positions_gap(model: PreTrainedModel) -> float:
    """Compare with `generate` where the model's own positions are not indices from 0: 0.0 where they are.

    `generate` passes indices to most of them (RoBERTa) and lets others take positions from the tokens (Kosmos-2.5).
    """
    if model.config.is_encoder_decoder or "position_ids" not in inspect.signature(model.forward).parameters:
        return 0.0
    context = random_tokens(model, context_of(model))
    own_TV = model(input_ids=ids_of(model, [context]), use_cache=False).logits[0]
    gap = float(difference(own_TV[-1], plain_logits(model, [context])[0, -1]))
    return 0.0 if gap < tolerance_of(model) else _generate_gap(model)


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
