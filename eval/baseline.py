"""The target alone: its number of threads, and its speed beside transformers' `generate`.

A baseline that is slower than it has to be makes every speedup too high.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.eval.prompts import Prompt
from draftsmith.eval.results import PlainSpeeds
from draftsmith.heads.hidden_states import inputs_for
from draftsmith.heads.model_config import context_limit
from draftsmith.metrics import median_interval

Decode = Callable[[Prompt, int], list[int]]

PROBE_TOKENS = 24
LARGE = 1_000_000_000
"""Number of parameters from which on all threads are used without measuring, which would take long."""
TRIALS, PROMPTS, TOKENS, FEW_PAIRS, PAIRS = 3, 4, 32, 6, 12
SLOWER_THAN_GENERATE = 0.95
"""A guard is reported where the whole interval of our tokens per second / transformers' is below this."""


def fastest_threads(target: PreTrainedModel, prompt: list[int], tokens: int = PROBE_TOKENS) -> int:
    """Return the number of threads with which the target alone is fastest: one, or torch's current number.

    A small model decodes no faster with several threads, and much slower if another process needs a core. With an
    accelerator or a large model, return torch's current number.

    Args:
        tokens: decoded in each trial.
    """
    given = torch.get_num_threads()
    if given == 1 or next(target.parameters()).device.type != "cpu" or target.num_parameters() >= LARGE:
        return given
    decoder, speeds = SpeculativeDecoder(target), {}
    for count in (given, 1):
        with threads(count):
            runs = [decoder.generate(prompt, max_new_tokens=tokens, eos_token_id=None) for _ in range(TRIALS)]
        speeds[count] = max(run.tokens_per_second for run in runs)
    return max(speeds, key=speeds.__getitem__)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with `count` CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_with_generate(target: PreTrainedModel, prompts: list[Prompt], *, compile: bool = False) -> PlainSpeeds:
    """Return greedy tokens per second, prefill included, of `target.generate` and of our target alone.

    Both decode a few prompts in turn, and the one that begins changes. The speeds and `ratio`, ours / theirs, are
    medians over `PAIRS` texts, or `FEW_PAIRS` where these tell on which side of `SLOWER_THAN_GENERATE` the ratio is.
    `ratio_interval` is its 95 % interval. `identical` counts the prompts with equal tokens.
    `compile`: of ours; `generate` runs uncompiled.
    """
    decoder = SpeculativeDecoder(target, compile=compile)

    def ours(prompt: Prompt, tokens: int) -> list[int]:
        out = decoder.generate(prompt.input_ids, inputs=prompt.inputs, max_new_tokens=tokens, eos_token_id=None)
        return out.tokens

    def theirs(prompt: Prompt, tokens: int) -> list[int]:
        return _generate(target, prompt, tokens)

    limit = None if target.config.is_encoder_decoder else context_limit(target.config)
    chosen, texts = prompts[:PROMPTS], dict[str, bool]()
    speeds: dict[Decode, list[float]] = {ours: [], theirs: []}
    ratios = list[float]()
    for number in range(-1, max(PAIRS, len(chosen))):  # the first calls allocate and choose kernels
        prompt = chosen[number % len(chosen)]
        tokens = TOKENS if limit is None else min(TOKENS, limit - len(prompt.input_ids))
        found = {
            decode: _timed(decode, prompt, tokens) for decode in ((ours, theirs) if number % 2 else (theirs, ours))
        }
        if number >= 0:
            texts[prompt.id] = found[ours][0] == found[theirs][0]
            for decode, (_, speed) in found.items():
                speeds[decode].append(speed)
            ratios.append(speeds[ours][-1] / speeds[theirs][-1])
        if len(ratios) == FEW_PAIRS and not min(ratios) < SLOWER_THAN_GENERATE <= max(ratios):
            break
    return {
        "prompts": len(chosen),
        "identical": sum(texts.values()),
        "generate_tokens_per_second": median(speeds[theirs]),
        "baseline_tokens_per_second": median(speeds[ours]),
        "ratio": median(ratios),
        "ratio_interval": median_interval(ratios),
    }


def _timed(decode: Decode, prompt: Prompt, tokens: int) -> tuple[list[int], float]:
    """Return the new tokens, and tokens per second."""
    started = time.perf_counter()
    out = decode(prompt, tokens)
    return out, len(out) / (time.perf_counter() - started)


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
        out = cast(Any, target).generate(ids, attention_mask=mask, generation_config=config, **inputs)
    finally:
        target.generation_config = before
    start = 1 if target.config.is_encoder_decoder else len(prompt.input_ids)
    return out[0, start:].tolist()
