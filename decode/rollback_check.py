"""Checks that a model with recurrent layers continues exactly after draft tokens were discarded."""

import torch
from transformers import PreTrainedModel

from draftsmith.decode.model_runner import ModelRunner
from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.model_config import text_config

CONTEXTS = (6, 3)
"""Tokens of two texts before the first draft."""
ROUNDS = ((1, 3), (3, 2), (3, 4), (3, 1), (3, 4), (3, 2), (4, 2), (1, 3))
"""Committed tokens of both texts in each round. More than a mixer reads again in one pass."""
WIDTH = 4


def check_rollback(model: PreTrainedModel, tolerance: float, rows: int) -> None:
    """Raise ConfigError unless logits after discarded drafts equal those of a plain forward pass.

    Args:
        tolerance: the largest difference, relative to the standard deviation of the logits.
        rows: 1, or 2 for a batch of texts of different lengths.
    """
    kind, what = model.config.model_type, "a text" if rows == 1 else "texts of different lengths"
    try:
        gap = rollback_gap(model, rows)
    except ConfigError:
        raise
    except Exception as error:  # models raise errors without a common base class
        raise ConfigError(
            f"model_type={kind!r} cannot read drafts ({reason_of(error)}); expected another target"
        ) from error
    if not gap < tolerance:
        raise ConfigError(
            f"model_type={kind!r} has recurrent layers, and after discarded draft tokens of {what} its logits "
            f"differ from those of a plain forward pass (by {gap:.2g} standard deviations); expected another target"
        )


def rollback_gap(model: PreTrainedModel, rows: int) -> float:
    """Return the largest difference of logits between chains after discarded drafts and plain forward passes.

    It is relative to the standard deviation of the logits. `rows`: 1, or 2 for a batch of texts of different lengths.
    """
    generator = torch.Generator().manual_seed(0)
    length = max(CONTEXTS) + sum(max(counts) for counts in ROUNDS) + WIDTH
    texts = torch.randint(text_config(model).vocab_size, (rows, length), generator=generator).tolist()
    device = next(model.parameters()).device
    expected_BTV = model(input_ids=torch.tensor(texts, device=device), use_cache=False).logits
    runner = ModelRunner(model, rows)
    runner.append([text[:context] for text, context in zip(texts, CONTEXTS, strict=False)])
    gap = 0.0
    for counts in ROUNDS:
        kept, starts = counts[:rows], list(runner.lengths)
        # The tokens after the committed ones are others than the text's.
        drafts = [
            text[start : start + count] + text[: WIDTH - count]
            for text, start, count in zip(texts, starts, kept, strict=True)
        ]
        logits_BQV = runner.tree(torch.tensor(drafts, device=device), [tuple(range(-1, WIDTH - 2))])
        for row, (start, count) in enumerate(zip(starts, kept, strict=True)):
            difference = logits_BQV[row, :count] - expected_BTV[row, start : start + count]
            gap = max(gap, float(difference.abs().max().nan_to_num(torch.inf)))
        runner.commit([list(range(count)) for count in kept])
    return gap / float(expected_BTV.float().std().clamp_min(1e-6))
