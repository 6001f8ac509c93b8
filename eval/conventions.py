"""The self-test of an imported drafter: its alpha as it was read, and under the conventions nearest to that.

No tensor shows which layer an id means, which position of a block predicts the first token, or what the residual of
EAGLE-3 holds. A drafter that is read by another convention than it was trained with loads, and drafts badly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode.sampling import Sampling
from draftsmith.distill.alignment import at_least_float32
from draftsmith.eval.teacher_forced import Rows, agreement, sample_texts
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.eagle3 import Eagle3
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.model_config import context_limit, text_config

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "def main(arguments):",
    "Question: what is 7 times 8?\nAnswer:",
    "Dear all, thank you for",
    "1. Wash the vegetables",
    "In this paper, we show that",
    "Yesterday evening the weather",
)
TOKENS = 48
"""Tokens that the target continues each prompt with, at temperature 1."""
GAIN, ERRORS = 0.01, 4.0
"""How much higher alpha must be under another convention to be reported: absolutely, and in standard errors."""


@dataclass(frozen=True)
class Reading:
    """Alpha at the first draft position, under one convention."""

    convention: str
    alpha: float
    tokens: int
    better: bool
    """Whether alpha is clearly higher than as the drafter was read."""


def readings_of(
    target: PreTrainedModel, drafter: TrainableDrafter, tokenizer: PreTrainedTokenizerBase
) -> list[Reading]:
    """Return the reading of `drafter` as it is, then those of the conventions nearest to its own.

    None are returned where no text has room for a draft: the contexts are too short, or the target ends at once.

    Args:
        drafter: attached to `target`; unchanged on return.
    """
    limits = [limit for limit in (context_limit(target.config), drafter.context_limit) if limit is not None]
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS]
    prompts = [ids for ids in rows if ids and all(len(ids) < limit for limit in limits)]
    room = min([TOKENS, *(limit - len(ids) for limit in limits for ids in prompts)])
    texts = sample_texts(target, prompts, Sampling(1.0), max_new_tokens=room)
    if not any(text.anchors for text in texts):
        return []

    def alphas() -> np.ndarray:
        tables = agreement(target, drafter, texts, 1, [_alpha])
        return np.concatenate([table["alpha"][:, 0] for table in tables])

    own = alphas()
    found = [Reading("as read", float(own.mean()), len(own), better=False)]
    for convention, owner, name, value in _neighbours(target, drafter):
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            gains = alphas() - own
        finally:
            setattr(owner, name, before)
        gain, error = float(gains.mean()), float(gains.std()) / max(len(gains), 1) ** 0.5
        better = gain > max(GAIN, ERRORS * error)
        found.append(Reading(convention, float(own.mean()) + gain, len(own), better))
    return found


def _alpha(rows: Rows) -> dict[str, Tensor]:
    """Return the sum over v of min(p_v, q_v) at temperature 1."""
    p_NV, q_NV = (at_least_float32(logits_NV).softmax(-1) for logits_NV in (rows.p_NV, rows.q_NV))
    return {"alpha": torch.minimum(p_NV, q_NV).sum(-1)}


def _neighbours(target: PreTrainedModel, drafter: TrainableDrafter) -> Iterator[tuple[str, Any, str, Any]]:
    """Return for each neighbouring convention its name, and the attribute and value that make the drafter follow it."""
    depth, layers = text_config(target).num_hidden_layers, drafter.needs.layers
    for shift, words in ((-1, "lower"), (1, "higher")):
        shifted = tuple(layer + shift for layer in layers)
        if layers and _within(layers, depth) and _within(shifted, depth):
            yield f"layer ids one {words}", drafter, "needs", replace(drafter.needs, layers=shifted)
    if isinstance(drafter, DFlash):
        first = drafter.body.first
        yield f"sample_from_anchor={first == 1}", drafter.body, "first", 1 - first
    if isinstance(drafter, Eagle3):
        layer = drafter.body.layers[0]
        value = not layer.norm_before_residual
        yield f"norm_before_residual={value}", layer, "norm_before_residual", value
    vocabulary = drafter.draft_vocabulary
    if isinstance(drafter, Medusa) and vocabulary is not None:  # others have `t2d` as well, which must agree
        offsets_D = vocabulary.tokens_D
        if int(offsets_D[-1]) + len(offsets_D) <= len(vocabulary.t2d):
            yield "token_map as offsets", vocabulary, "d2t", offsets_D


def _within(layers: Sequence[int], depth: int) -> bool:
    return all(1 <= layer <= depth for layer in layers)
