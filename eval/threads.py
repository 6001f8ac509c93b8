"""How many CPU threads to measure with: what serves the target alone best, so that the baseline is never held back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from draftsmith.decode.decoder import SpeculativeDecoder

PROBE_TOKENS = 24
TRIALS = 3


def fastest_threads(target: nn.Module, prompt: list[int]) -> int:
    """The thread count with the highest speed of the target alone: one, or as many as torch was given.

    A small model decodes no faster with several threads, and far slower once another process wants a core. On an
    accelerator threads do not matter and torch's number stays.
    """
    given = torch.get_num_threads()
    if given == 1 or next(target.parameters()).device.type != "cpu":
        return given
    decoder, speeds = SpeculativeDecoder(target), {}
    for count in (given, 1):
        with threads(count):
            runs = [decoder.generate(prompt, max_new_tokens=PROBE_TOKENS, eos_token_id=None) for _ in range(TRIALS)]
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
