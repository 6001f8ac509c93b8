"""The prompts of a call: lists of tokens from lists and padded tensors, and the check of their ids."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.decode.sampling import require_seed
from draftsmith.errors import ConfigError


def prompt_rows(
    input_ids: Tensor | Sequence, attention_mask: Tensor | None = None, *, may_be_empty: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the tokens of each prompt, and the padding on its left.

    Accepts [T], [B, T], a list of tokens, or a list of such lists. The model does not read the padding; logits
    processors and stopping criteria do, as in transformers' `generate`.
    """
    paddings: list[list[int]] | None = None
    if isinstance(input_ids, Tensor):
        ids = input_ids if input_ids.dim() > 1 else input_ids[None]
        if attention_mask is not None:
            mask = attention_mask if attention_mask.dim() > 1 else attention_mask[None]
            if mask.shape != ids.shape:
                raise ConfigError.of("attention_mask shape", list(mask.shape), f"that of input_ids, {list(ids.shape)}")
            rows = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
            paddings = [row[: int(keep.argmax())].tolist() for row, keep in zip(ids, mask, strict=True)]
        else:
            rows = ids.tolist()
    else:
        if attention_mask is not None:
            raise ConfigError("attention_mask with lists of tokens; expected it with a tensor of input_ids only")
        nested = bool(input_ids) and isinstance(input_ids[0], (list, tuple, Tensor))
        rows = [torch.as_tensor(row).tolist() for row in input_ids] if nested else [list(input_ids)]
    for number, row in enumerate(rows):
        if not row and not may_be_empty:
            raise ConfigError(f"prompt{f' {number}' if len(rows) > 1 else ''}=0 tokens; expected at least 1")
    if not rows:
        raise ConfigError("prompts=0; expected at least 1")
    return rows, paddings or [[] for _ in rows]


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
    if isinstance(seeds, int):
        seeds = range(seeds, seeds + count)
    for seed in (seeds[0], seeds[-1]) if isinstance(seeds, range) else seeds:
        require_seed("seed", seed, 2**64 - 1)
    if len(seeds) != count:
        raise ConfigError.of("seeds", list(seeds), f"one for each of the {count} prompts")
    return seeds
