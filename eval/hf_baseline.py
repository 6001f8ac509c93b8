"""Compare the target alone with transformers' `generate`: speedups must not come from a slow baseline."""

import time
from collections.abc import Callable
from statistics import median
from typing import Protocol, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.results import PlainSpeeds
from draftsmith.heads.model_config import context_limit
from draftsmith.heads.processor_inputs import inputs_for

PROMPTS, TOKENS, TRIALS = 4, 32, 3


class _Generates(Protocol):
    """The part of transformers' `GenerationMixin` that is used here: `PreTrainedModel` itself does not have it."""

    def generate(
        self, inputs: Tensor, *, attention_mask: Tensor, generation_config: GenerationConfig, **tensors: Tensor
    ) -> Tensor: ...


def compare_with_generate(target: PreTrainedModel, prompts: list[Prompt], *, compile: bool = False) -> PlainSpeeds:
    """Return greedy tokens per second, prefill included, of `target.generate` and of our target alone.

    `generate_tokens_per_second` and `baseline_tokens_per_second` are medians over a few prompts, each the best of three
    trials in turn; `ratio` and `best_ratio` are median and maximum over prompts of ours / theirs; `identical` counts
    the prompts with equal tokens. `compile`: of ours; `generate` runs uncompiled.
    """
    decoder = SpeculativeDecoder(target, compile=compile)

    def ours(prompt: Prompt, tokens: int) -> list[int]:
        out = decoder.generate(prompt.input_ids, inputs=prompt.inputs, max_new_tokens=tokens, eos_token_id=None)
        return out.tokens

    def theirs(prompt: Prompt, tokens: int) -> list[int]:
        return _generate(target, prompt, tokens)

    limit = context_limit(target.config)
    speeds: dict[str, list[float]] = {"generate": [], "baseline": []}
    identical = 0
    chosen = prompts[:PROMPTS]
    for number, prompt in enumerate(chosen):
        tokens = (
            TOKENS if limit is None or target.config.is_encoder_decoder else min(TOKENS, limit - len(prompt.input_ids))
        )
        if number == 0:  # first calls allocate and choose kernels
            ours(prompt, tokens)
            theirs(prompt, tokens)
        trials = [(_timed(ours, prompt, tokens), _timed(theirs, prompt, tokens)) for _ in range(TRIALS)]
        (own_tokens, _), (plain_tokens, _) = trials[-1]
        identical += own_tokens == plain_tokens
        speeds["baseline"].append(max(len(own) / seconds for (own, seconds), _ in trials))
        speeds["generate"].append(max(len(plain) / seconds for _, (plain, seconds) in trials))
    ratios = [a / b for a, b in zip(speeds["baseline"], speeds["generate"], strict=True)]
    return {
        "prompts": len(chosen),
        "identical": identical,
        "generate_tokens_per_second": median(speeds["generate"]),
        "baseline_tokens_per_second": median(speeds["baseline"]),
        "ratio": median(ratios),
        "best_ratio": max(ratios),
    }


def _timed(decode: Callable[[Prompt, int], list[int]], prompt: Prompt, tokens: int) -> tuple[list[int], float]:
    started = time.perf_counter()
    out = decode(prompt, tokens)
    return out, time.perf_counter() - started


@torch.inference_mode()
def _generate(target: PreTrainedModel, prompt: Prompt, tokens: int) -> list[int]:
    """Decode the same number of tokens with `generate`, without EOS."""
    ids = torch.tensor([prompt.input_ids], device=next(target.parameters()).device)
    inputs = inputs_for(target, prompt.inputs or {})
    own = target.generation_config
    config = GenerationConfig(
        max_new_tokens=tokens,
        min_new_tokens=None,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=None,
        pad_token_id=0,
        bos_token_id=own.bos_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    before, target.generation_config = own, config  # unset values would be taken from the model's own
    try:
        mask = torch.ones_like(ids)
        out = cast(_Generates, target).generate(ids, attention_mask=mask, generation_config=config, **inputs)
    finally:
        target.generation_config = before
    start = 1 if target.config.is_encoder_decoder else len(prompt.input_ids)
    return out[0, start:].tolist()
