"""Passes in which the logits of a token do not depend on its place: greedy texts then equal the target's bit by bit.

In bf16, passes over one and over several tokens choose other kernels and round differently, which changes the argmax at
near ties. With one number of tokens and of slots for every pass, each row of it is computed in the same way.
"""

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from draftsmith.decode.cache.recurrent import is_recurrent
from draftsmith.decode.passes.base import INVARIANT_SLOTS, INVARIANT_WIDTH, Plan
from draftsmith.decode.passes.capability import Capability
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError
from draftsmith.heads.lm_head import evaluating
from draftsmith.heads.model_config import EXPERTS, context_limit, text_config, uncompiled

CHAINS_ONLY = "invariant=True computes the tokens of a branch in another order"
_MEASURED: "WeakKeyDictionary[PreTrainedModel, bool]" = WeakKeyDictionary()


def require_invariant(model: PreTrainedModel, capability: Capability, *, compile: bool) -> None:
    """Raise ConfigError unless the logits of a token are equal at every place of a pass; measured once a model."""
    if compile:
        raise ConfigError("invariant=True with compile=True, whose kernels depend on the text's length; expected one")
    if any(getattr(text_config(model), name, None) for name in EXPERTS):
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r}, whose experts read as many tokens as are routed to "
            "them; expected invariant=False"
        )
    if model.config.is_encoder_decoder or capability.no_ragged or is_recurrent(model):
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r}; expected a decoder-only target with attention layers"
        )
    if model not in _MEASURED:
        with evaluating(model), uncompiled(model):
            _MEASURED[model] = _is_invariant(model)
    if not _MEASURED[model]:
        parameter = next(model.parameters())
        dtype = str(parameter.dtype).removeprefix("torch.")
        raise ConfigError(
            f"invariant=True with model_type={capability.kind!r} in {dtype} on {parameter.device.type}: the logits of "
            "a token depend on its place in a pass; expected invariant=False"
        )


@torch.inference_mode()
def _is_invariant(model: PreTrainedModel) -> bool:
    """Return whether passes that start at each token of a chain return the same logits for it, bit by bit."""
    device, generator = next(model.parameters()).device, torch.Generator().manual_seed(0)
    limit = context_limit(model.config)
    # Passes end before, at and after a multiple of the slots, if the context is as long.
    before = INVARIANT_SLOTS - INVARIANT_WIDTH - INVARIANT_WIDTH // 2
    before = before if limit is None else max(1, min(before, limit - INVARIANT_WIDTH))
    count = before + INVARIANT_WIDTH
    tokens_1T = torch.randint(text_config(model).vocab_size, (1, count), generator=generator).to(device)
    runner = ModelRunner(model, 1, Plan(invariant=True))
    runner.append(tokens_1T[:, :before].tolist())
    chain_1Q = tokens_1T[:, before:]
    first_1QV = runner.line(chain_1Q)
    for start in range(1, INVARIANT_WIDTH):
        runner.commit([[0]])
        if not torch.equal(runner.line(chain_1Q[:, start:]), first_1QV[:, start:]):
            return False
    return True
