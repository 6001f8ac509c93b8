"""Measures the seconds of forward passes of a target and a drafter on this machine, for `Costs`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import cycle, islice
from statistics import median
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.costs import Costs, now
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.recurrent import MOST_AGAIN, is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import Chain
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import context_limit

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CONTEXT, REPEATS = 128, 7
SHORT, LONG = 1, 7
TURNS, ROUNDS = 6, 5
"""Whole rounds are timed with chains of SHORT and LONG tokens, TURNS times alternately, ROUNDS rounds each time. The
target reads 2 and 8 tokens then, to which compiled passes add no padding."""
NEARLY_FREE = 1e-4
"""As a share of a target pass: the cost of a step that is too short to be measured."""


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel,
    drafter: Drafter | None = None,
    *,
    compile: bool = False,
    verify: dict[int, float] | None = None,
    text: Sequence[int] = (),
) -> Costs:
    """Return the median seconds of forward passes after 128 tokens, on this machine with the current threads.

    Widths are timed alternately. A drafter's steps are also timed within whole rounds, where they take longer than
    alone because the target's weights have replaced the drafter's in the processor's caches. A part of the difference
    does not depend on the number of steps and becomes `Costs.round`.

    Args:
        compile: time compiled passes, whose widths are powers of two.
        verify: the target's seconds, if they are known.
        text: tokens that are read, such as those of a prompt; by default different ones of the vocabulary. A mixture of
            experts reads the more weights, the more its tokens differ.
    """
    verify = verify or _curve(target, compile, text)
    if drafter is None or drafter.only_retrieves:
        return Costs(verify, {1: min(verify.values()) * NEARLY_FREE})
    model = getattr(drafter, "model", None)
    draft = {1: 0.0}
    if isinstance(model, nn.Module):
        draft = _curve(cast(PreTrainedModel, model), compile, text)  # a draft model's
    alone = Costs(verify, draft)
    reach = min(LONG, drafter.max_draft_length or LONG)
    seconds: dict[int, list[float]] = {SHORT: [], reach: []}
    for _ in range(TURNS):  # alternately, so that a slow phase of the machine affects both
        for length, rounds in seconds.items():
            rounds += _round_seconds(target, drafter, length, compile, text)
    short, long = median(seconds[SHORT]), median(seconds[reach])
    step = draft[1]
    if reach > SHORT:
        check = alone.verify_seconds(reach + 1) - alone.verify_seconds(SHORT + 1)
        step = max((long - short - check) / (reach - SHORT), verify[1] * NEARLY_FREE)
    fixed = max(short - step - alone.verify_seconds(SHORT + 1), 0.0)
    return Costs(verify, {width: step + max(value - draft[1], 0.0) for width, value in draft.items()}, fixed)


def _tokens(config: PreTrainedConfig, text: Sequence[int], count: int) -> list[int]:
    """Return `count` tokens of `text`, repeated, or without any tokens of the vocabulary; special ones are left out."""
    own = config.get_text_config(decoder=True)
    named = {**config.to_dict(), **own.to_dict()}.items()  # those of images have no embeddings
    special = {value for key, value in named if key.endswith(("_token_id", "_token_index")) and isinstance(value, int)}
    drawn = torch.randint(own.vocab_size, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    for tokens in (text, drawn):
        known = [token for token in tokens if token < own.vocab_size and token not in special]
        if known:
            return list(islice(cycle(known), count))
    return drawn


def _round_seconds(
    target: PreTrainedModel, drafter: Drafter, draft_length: int, compile: bool, text: Sequence[int]
) -> list[float]:
    """Return the seconds of a few sampled rounds with `draft_length` tokens, without the first, which allocates."""
    configs = [getattr(model, "config", None) for model in (target, getattr(drafter, "model", None))]
    limits = [None if config is None else context_limit(config) for config in configs]
    limit = min(CONTEXT * 4 if limit is None else limit for limit in limits)
    length = max(1, min(CONTEXT, limit - ROUNDS * (draft_length + 1) - 2))
    tokens = _tokens(target.config, text, length)
    source = tokens[:8] if target.config.is_encoder_decoder else []
    sequence = DecodeSequence(tokens, length + ROUNDS * (draft_length + 1) + 2, source=source)
    reader, processors = TransformersTarget(target, plan=Plan(compile=compile)), Processors(Sampling(1.0))
    loop = DecodeLoop(reader, drafter, Chain(draft_length), [sequence], processors, compile=compile)
    with closing(reader), closing(loop):
        loop.prefill()
        while len(sequence.rounds) < ROUNDS and loop.texts:
            loop.round()
    return [record.seconds for record in sequence.rounds[1:] or sequence.rounds]


@contextmanager
def _reading(model: PreTrainedModel, text: Sequence[int], *, compile: bool) -> Iterator[Callable[[int], None]]:
    """Return a function that reads a number of tokens after a context and then discards them."""
    limit = context_limit(model.config) or CONTEXT + WIDTHS[-1]
    tokens = _tokens(model.config, text, CONTEXT + WIDTHS[-1])
    longest = min(limit, CONTEXT + MOST_AGAIN + WIDTHS[-1])
    runner = ModelRunner(model, 1, Plan(sources=[tokens[:8]], compile=compile, longest=longest))
    again = MOST_AGAIN // 2 if is_recurrent(model) else 0
    runner.append([tokens[: max(1, min(CONTEXT, limit - WIDTHS[-1] - again - 1))]])
    ids = torch.tensor([tokens[-WIDTHS[-1] :]], device=next(model.parameters()).device)
    if again:  # as after rejected drafts: on average, recurrent layers read this many tokens again
        runner.line(ids[:, : again + 1])
        runner.commit([[*range(again)]])

    def read(width: int) -> None:
        runner.line(ids[:, :width])
        runner.commit([[]])

    try:
        yield read
    finally:
        runner.close()


def _curve(model: PreTrainedModel, compile: bool, text: Sequence[int]) -> dict[int, float]:
    """Return the median seconds in which the model reads each number of tokens after a context."""
    seconds: dict[int, list[float]] = {width: [] for width in WIDTHS if not (compile and width & (width - 1))}
    device = next(model.parameters()).device
    with _reading(model, text, compile=compile) as read:
        for repeat in range(REPEATS + 1):
            for width, measured in seconds.items():
                started = now(device)
                read(width)
                ended = now(device)
                if repeat > 0:  # the first pass allocates and chooses kernels
                    measured.append(ended - started)
    return {width: median(values) for width, values in seconds.items()}
