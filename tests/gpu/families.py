"""A drafter of each family for one tiny target. Weights are drawn on the CPU: they are the same on every device."""

from typing import Any

import torch
from conftest import make_llama
from transformers import LlamaForCausalLM

from draftsmith.heads import HEADS
from draftsmith.heads.base import TrainableDrafter

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "draft_model": ("draft_model", {"init": "target_layers", "keep": [0, 3]}),
    "medusa": ("medusa", {"draft_vocabulary": list(range(0, 64, 2))}),
    "eagle": ("eagle", {"noise": 0.0}),
    "hass": ("hass", {"noise": 0.0}),
    "eagle3": ("eagle3", {"draft_vocabulary": list(range(0, 64, 2))}),
    "mtp": ("mtp", {}),
    "peagle": ("peagle", {"num_tokens": 3}),
    "dflash": ("dflash", {"block_size": 4}),
    "dspark": ("dflash", {"block_size": 4, "markov_rank": 3, "confidence_head": True}),
    "dflash2": ("dflash", {"block_size": 4, "conv_kernel_size": 2, "selector_rank": 3, "selector_top_k": 4}),
}
"""No feature noise, and as many anchors as positions: generators of random numbers differ between devices."""
PROMPTS = [[5, 9, 33, 2, 5, 9, 33, 2], [7], [40, 3, 12]]
"""Of different lengths: batches of them are ragged."""


def target_model() -> LlamaForCausalLM:
    """Six layers, on the CPU and frozen; logits far from flat, so that a near tie is rare."""
    return make_llama(num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2).requires_grad_(False)


def make_drafter(name: str, target: LlamaForCausalLM, *, noise: float = 0.02) -> TrainableDrafter:
    """A drafter on the target's device; `noise` moves it off its initial weights, many of which are zero."""
    kind, options = FAMILIES[name]
    device = target.device
    torch.manual_seed(3)
    drafter = HEADS[kind].from_target(target.cpu(), **options).eval()
    for parameter in drafter.parameters():
        parameter.data += noise * torch.randn_like(parameter)
    target.to(device)
    return drafter.to(device)
