"""Measures the seconds of forward passes of a target and a drafter on this machine, for `Costs`."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.model_runner import ModelRunner
from draftsmith.decode.policies.chain import Chain, ConfidenceChain
from draftsmith.decode.recurrent_state import MOST_AGAIN, is_recurrent
from draftsmith.decode.sampling import Processors, Sampling, SeededRng
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
    widest: int = 64,
    compile: bool = False,
    verify: dict[int, float] | None = None,
) -> Costs:
    """Return the median seconds of forward passes after 128 tokens, on this machine with the current threads.

    Widths are timed alternately. A drafter's steps are also timed within whole rounds, where they take longer than
    alone because the target's weights have replaced the drafter's in the processor's caches. A part of the difference
    does not depend on the number of steps and becomes `Costs.round`.

    `compile`: of compiled passes, whose widths are powers of two. `verify`: the target's seconds, if they are known.
    """
    widths = [width for width in WIDTHS if width <= widest and not (compile and width & (width - 1))]
    verify = verify or _curve(target, widths, compile)
    if drafter is None or drafter.only_retrieves:
        return Costs(verify, {1: min(verify.values()) * NEARLY_FREE})
    model = getattr(drafter, "model", None)
    draft = {1: 0.0}
    if isinstance(model, nn.Module):
        draft = _curve(cast(PreTrainedModel, model), widths, compile)  # a draft model's
    alone = Costs(verify, draft)
    reach = min(LONG, drafter.max_draft_length or LONG)
    seconds: dict[int, list[float]] = {SHORT: [], reach: []}
    for _ in range(TURNS):  # alternately, so that a slow phase of the machine affects both
        for length, rounds in seconds.items():
            rounds += _round_seconds(target, drafter, length, compile)
    short, long = median(seconds[SHORT]), median(seconds[reach])
    step = draft[1]
    if reach > SHORT:
        check = alone.verify_seconds(reach + 1) - alone.verify_seconds(SHORT + 1)
        step = max((long - short - check) / (reach - SHORT), verify[1] * NEARLY_FREE)
    fixed = max(short - step - alone.verify_seconds(SHORT + 1), 0.0)
    return Costs(verify, {width: step + max(value - draft[1], 0.0) for width, value in draft.items()}, fixed)


def _round_seconds(target: PreTrainedModel, drafter: Drafter, draft_length: int, compile: bool) -> list[float]:
    """Return the seconds of a few sampled rounds with `draft_length` tokens, without the first, which allocates."""
    configs = [getattr(model, "config", None) for model in (target, getattr(drafter, "model", None))]
    limits = [None if config is None else context_limit(config) for config in configs]
    limit = min(CONTEXT * 4 if limit is None else limit for limit in limits)
    length = max(1, min(CONTEXT, limit - ROUNDS * (draft_length + 1) - 2))
    source = [1] * 8 if target.config.is_encoder_decoder else []
    sequence = DecodeSequence([1] * length, length + ROUNDS * (draft_length + 1) + 2, SeededRng(0), source=source)
    reader, processors = TransformersTarget(target), Processors(Sampling(1.0))
    reader.compile = compile
    # Compiled, a chain of fixed length is one graph, and cheaper than the steps of the policies that plan.
    policy = ConfidenceChain(0.0, draft_length) if compile else Chain(draft_length)
    loop = DecodeLoop(reader, drafter, policy, [sequence], processors, compile=compile)
    with closing(reader), closing(loop):
        loop.prefill()
        while len(sequence.rounds) < ROUNDS and loop.texts:
            loop.round()
    return [record.seconds for record in sequence.rounds[1:] or sequence.rounds]


@contextmanager
def _reading(model: PreTrainedModel, *, compile: bool) -> Iterator[Callable[[int], None]]:
    """Return a function that reads a number of tokens after a context and then discards them."""
    limit = context_limit(model.config) or CONTEXT + WIDTHS[-1]
    runner = ModelRunner(model, 1, [[1] * 8], compile=compile, longest=min(limit, CONTEXT + MOST_AGAIN + WIDTHS[-1]))
    again = MOST_AGAIN // 2 if is_recurrent(model) else 0
    runner.append([[1] * max(1, min(CONTEXT, limit - WIDTHS[-1] - again - 1))])
    ids = torch.ones(1, WIDTHS[-1], dtype=torch.int64, device=next(model.parameters()).device)
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


def _curve(model: PreTrainedModel, widths: list[int], compile: bool) -> dict[int, float]:
    """Return the median seconds in which the model reads each number of tokens after a context."""
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    device = next(model.parameters()).device
    with _reading(model, compile=compile) as read:
        for repeat in range(REPEATS + 1):
            for width in widths:
                started = now(device)
                read(width)
                ended = now(device)
                if repeat > 0:  # the first pass allocates and chooses kernels
                    seconds[width].append(ended - started)
    return {width: median(values) for width, values in seconds.items()}
