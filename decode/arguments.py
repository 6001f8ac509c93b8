"""Checks of the decoder's arguments: prompts, which may be lists, arrays or padded tensors, and what fits together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.passes.capability import Capability, capability_of
from draftsmith.decode.policies import Policy
from draftsmith.decode.rules import Rule
from draftsmith.decode.sampling import require_seed
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel

Ids = Tensor | np.ndarray | Sequence
"""Tokens of one prompt or of several, or a mask over them."""
_OF_TOKENIZER = ("input_ids", "attention_mask", "token_type_ids")
"""Keys that tokenizers return for a text; all its tokens are of one type."""


def prompt_rows(
    input_ids: Ids | Mapping[str, Any], attention_mask: Ids | None = None, *, may_be_empty: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each prompt, and the padding on its left.

    Accepts [T] and [B, T] as a tensor, an array or lists, rows of different lengths, and a tokenizer's output. The
    model does not read tokens at which the mask is 0; logits processors and stopping criteria read the padding on the
    left, as in transformers' `generate`.
    """
    given: Any = input_ids
    if isinstance(input_ids, Mapping):
        if others := sorted(set(input_ids) - set(_OF_TOKENIZER)):
            raise ConfigError(f"input_ids[{others[0]!r}]; expected it in `inputs`, see `generate_batch`")
        attention_mask = input_ids.get("attention_mask") if attention_mask is None else attention_mask
        given = input_ids["input_ids"]
    rows = _rows("input_ids", given)
    paddings: list[list[int]] = [[] for _ in rows]
    if attention_mask is not None:
        masks = _rows("attention_mask", attention_mask)
        if (shape := list(map(len, masks))) != (expected := list(map(len, rows))):
            raise ConfigError.of("attention_mask lengths", shape, f"those of input_ids, {expected}")
        if not set().union(*masks) <= {0, 1}:
            raise ConfigError("attention_mask with other values than 0 and 1; expected True or 1 at tokens")
        paired = list(zip(rows, masks, strict=True))
        paddings = [row[: [*mask, 1].index(1)] for row, mask in paired]
        rows = [[token for token, kept in zip(row, mask, strict=True) if kept] for row, mask in paired]
    for number, row in enumerate(rows):
        if not row and not may_be_empty:
            raise ConfigError(f"prompt{f' {number}' if len(rows) > 1 else ''}=0 tokens; expected at least 1")
    if not rows:
        raise ConfigError("prompts=0; expected at least 1")
    return rows, paddings


def _rows(name: str, values: Ids) -> list[list[int]]:
    """Return rows of numbers; ConfigError for values that are not whole numbers."""
    if not isinstance(values, Tensor | np.ndarray):
        nested = len(values) > 0 and np.ndim(values[0]) > 0
        return [_row(name, row) for row in values] if nested else [_row(name, values)]
    if values.ndim > 2:
        raise ConfigError.of(f"{name} shape", list(values.shape), "[T] or [B, T]")
    return [_row(name, row) for row in (values if values.ndim > 1 else values[None])]


def _row(name: str, values: Ids) -> list[int]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    whole = array.astype(np.int64) if array.dtype.kind in "biuf" else None
    if whole is None or not (whole == array).all():
        raise ConfigError(f"{name} of {array.dtype}; expected whole numbers")
    return whole.tolist()


def require_known(rows: Sequence[list[int]], model: PreTrainedModel) -> None:
    """Raise ConfigError for tokens that the model has no embedding for."""
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, Tensor)
    known = embeddings.shape[0]
    for number, row in enumerate(rows):
        for token in (min(row), max(row)) if row else ():
            if not 0 <= token < known:
                raise ConfigError(
                    f"prompt {number} contains token {token}; expected 0 to {known - 1}, the target's vocabulary"
                )


def one_seed_each(seeds: Sequence[int] | int, count: int) -> Sequence[int]:
    """Return one seed for each of `count` prompts; ConfigError for another number of seeds or seeds out of range."""
    if isinstance(seeds, int | np.integer):
        seeds = range(int(seeds), int(seeds) + count)
    for seed in (seeds[0], seeds[-1]) if isinstance(seeds, range) else seeds:
        require_seed("seed", seed, 2**64 - 1)
    if len(seeds) != count:
        raise ConfigError.of("seeds", list(seeds), f"one for each of the {count} prompts")
    return seeds


# Targets, drafters, policies and rules that fit together.


def capabilities(target: PreTrainedModel, drafter: Drafter | None) -> list[Capability]:
    """Return the capabilities of the target and of the models that `drafter` runs with a cache of their own."""
    modules = () if drafter is None else drafter.modules()
    models = [target, *(module.model for module in modules if isinstance(module, DraftModel))]
    return [capability_of(model) for model in models]


def require_readable(policy: Policy, models: Sequence[Capability]) -> None:
    """Raise ConfigError if drafts of `policy` may have branches, and one of the models reads chains only."""
    for capability in models:
        if capability.no_trees and policy.branches:
            raise ConfigError(capability.refusal(f"policy={policy}"))


def require_fitting(rule: Rule, drafter: Drafter, policy: Policy | None) -> None:
    """Raise ConfigError if `rule` does not apply to retrieved drafts or to drafts of `policy`."""
    if rule.drawn and type(drafter).retrieve is not Drafter.retrieve:
        raise ConfigError(f"rule={rule.name!r} needs {rule.takes}; a {drafter.type} drafter also retrieves drafts")
    if policy is not None:
        rule.require(drawn=not policy.chooses, is_chain=not policy.branches)


def require_reach(drafter: Drafter, draft_length: int) -> None:
    """Raise ConfigError for more draft tokens than the drafter proposes."""
    most = drafter.max_draft_length
    if most is not None and draft_length > most:
        raise ConfigError.of(
            "draft_length", draft_length, f"at most {most}, which is what this {drafter.type} drafter proposes"
        )


def require_same_vocabulary(drafter: Drafter, target: PreTrainedModel) -> None:
    """Raise ConfigError for a drafter with another vocabulary size, unless the number of shared tokens is known."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if drafter.vocab_size in (None, vocabulary) or drafter.shared_vocabulary is not None:
        return
    raise ConfigError(f"drafter vocabulary={drafter.vocab_size}; expected the target's {vocabulary}")
