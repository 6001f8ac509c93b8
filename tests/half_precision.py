"""Greedy texts of a target in half precision, against a pass in float32 with the same weights."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

MARGIN = 4
"""Two passes of other shapes may differ by twice the rounding of one; and the largest of few positions is no bound."""


@torch.inference_mode()
def require_greedy(target: PreTrainedModel, prompt: list[int], tokens: Sequence[int]) -> None:
    """Check that every token is the most likely one after the tokens before it, up to the rounding of the target.

    The rounding is that of one pass over the text, measured. It has to tell the likeliest token from most others.
    """
    ids_1T = torch.tensor([[*prompt, *tokens]])
    exact_TV = copy.deepcopy(target).float()(ids_1T).logits[0, len(prompt) - 1 : -1]
    rounding = MARGIN * float((target(ids_1T).logits[0, len(prompt) - 1 : -1].float() - exact_TV).abs().max())
    behind_TV = exact_TV.amax(-1, keepdim=True) - exact_TV
    assert (behind_TV < rounding).sum(-1).float().mean() < 4, "the rounding would excuse many of the tokens"
    assert behind_TV.gather(-1, torch.tensor(list(tokens))[:, None]).max() < rounding
