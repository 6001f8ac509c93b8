"""Measures the seconds of passes and rounds of a target and a drafter on this machine, as `Costs`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import cycle, islice
from statistics import median
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.locks import Locks, running
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.plan import Plan
from draftsmith.decode.passes.recurrent import MOST_RECOMPUTED, is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies.policy import Chain
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import context_limit, plain_model, require_in_memory
from draftsmith.heads.retrieval import Hybrid

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CONTEXT, REPEATS = 128, 7
SHORT, LONG = 1, 7
TURNS = 25
"""Times that rounds with chains of SHORT and LONG tokens are timed, the first time to warm up. The target reads 2 and 8
tokens then, to which compiled passes add no padding."""
PROBED = (0, 1, 3, 7)
"""Lengths of the drafts of a quick measurement, in turn."""
SHARED_CONTEXT = 32
"""Tokens of each text of a batch in a quick measurement."""
LEAST_TURNS, MOST_TURNS, ALIKE = 3, 8, 1.1
"""A quick measurement goes through them three times, the first time to warm up, and on until the two fastest rounds of
every length differ by a tenth at most, as they do unless other processes take the processor."""
NEARLY_FREE = 1e-4
"""As a share of a target pass: the cost of a step that is too short to be measured."""


@torch.inference_mode()
def measure_costs(
    target: PreTrainedModel,
    drafter: Drafter | None = None,
    *,
    quick: bool = False,
    texts: int = 1,
    compile: bool = False,
    invariant: bool = False,
    verify: dict[int, dict[int, float]] | None = None,
    text: Sequence[int] = (),
) -> Costs:
    """Return the seconds of passes and rounds after 128 tokens, on this machine with the current threads.

    Widths are timed alternately, and so are whole rounds with short and long chains: within rounds a drafter's steps
    take longer than alone, because the target's weights have replaced the drafter's in the processor's caches. A part
    of the difference does not depend on the number of steps and becomes `Costs.round` and `Costs.first`.

    Args:
        quick: twelve rounds or a few more, and no passes of other widths. Less precise: the fastest round of each
            length counts instead of the median. On a CPU the seconds are those in which this thread had the processor,
            so that other processes matter little.
        texts: with `quick`, the batch size.
        compile: time compiled passes, whose widths are powers of two.
        invariant: with `quick`, time passes of one shape, see `Plan.invariant`.
        verify: the target's seconds, if they are known.
        text: tokens that are read, such as those of a prompt; by default different ones of the vocabulary. A mixture of
            experts reads the more weights, the more its tokens differ.
    """
    target = plain_model(target)
    require_in_memory(target)
    while isinstance(drafter, Hybrid):  # copies cost only the target's pass
        drafter = drafter.drafter
    Locks(drafter).check()  # before passes are timed, for seconds
    if not quick:
        verify = verify or {1: _curve(target, compile, text)}
    if drafter is None or drafter.only_retrieves:
        verify = verify or {texts: {1: 1.0}}
        return Costs(verify, {1: {1: min(verify[min(verify)].values()) * NEARLY_FREE}})
    model, draft = getattr(drafter, "model", None), {1: 0.0}
    if isinstance(model, nn.Module) and not quick:
        draft = _curve(cast(PreTrainedModel, model), compile, text)  # a draft model's
    reach = drafter.max_draft_length or LONG
    lengths = sorted({min(length, reach) for length in (PROBED if quick else (SHORT, LONG))})
    typical, plan = min if quick else median, Plan(compile=compile, invariant=invariant)
    of = _rounds(target, drafter, lengths, texts, quick, plan, text)
    rounds = {n: (typical([r.draft_seconds for r in own]), typical([r.seconds for r in own])) for n, own in of.items()}
    if verify is None:
        verify = {texts: {n + 1: min(r.seconds - r.draft_seconds for r in own) for n, own in of.items()} or {1: 1.0}}
    return _fitted(verify, draft, texts, {length: seconds for length, seconds in rounds.items() if length})


def _fitted(
    verify: dict[int, dict[int, float]], draft: dict[int, float], texts: int, rounds: dict[int, tuple[float, float]]
) -> Costs:
    """Return the costs with which the drafting and all of rounds take these seconds, by the length of their drafts.

    `draft`: the drafter's passes by width, outside rounds.
    """
    costs, least = Costs(verify, {texts: draft}), min(verify[min(verify)].values()) * NEARLY_FREE
    if not rounds:  # no text has room for two
        return Costs(verify, {texts: {1: least}})
    short, long = min(rounds), max(rounds)
    beyond = {length: rounds[length][1] - costs.verify_seconds(length + 1, texts) for length in (short, long)}
    step = draft[1] or beyond[short] / short
    if long > short:
        step = (beyond[long] - beyond[short]) / (long - short)
    step = max(step, least)
    fixed = max(beyond[short] - short * step, 0.0)
    first = min(max(rounds[short][0] - short * step, 0.0), fixed)
    passes = {width: step + max(value - draft[1], 0.0) for width, value in draft.items()}
    return Costs(verify, {texts: passes}, {texts: fixed - first}, {texts: first})


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


def _rounds(
    target: PreTrainedModel,
    drafter: Drafter,
    lengths: Sequence[int],
    texts: int,
    quick: bool,
    plan: Plan,
    text: Sequence[int],
) -> dict[int, list[Round]]:
    """Return the records of rounds of sampled texts with chains of each length in turn, by the length of the draft."""
    prompt = _tokens(target.config, text, CONTEXT if texts == 1 else SHARED_CONTEXT)
    configs = [getattr(model, "config", None) for model in (target, getattr(drafter, "model", None))]
    limits = [None if config is None else context_limit(config) for config in configs]
    limit = min(CONTEXT * 4 if limit is None else limit for limit in limits)
    turns = MOST_TURNS if quick else TURNS
    most = turns * len(lengths) * (LONG + 1) + 2
    prompt = prompt[: max(1, min(len(prompt), limit - most))]
    source, end = prompt[:8] if target.config.is_encoder_decoder else [], min(len(prompt) + most, limit)
    sequences = [DecodeSequence([*prompt], end, number, source=source, number=number) for number in range(texts)]
    reader, processors = TransformersTarget(target, plan=plan), Processors(Sampling(1.0), sequences=texts)
    loop = DecodeLoop(reader, drafter, Chain(max(lengths)), sequences, processors, compile=plan.compile)
    if quick:  # `thread_time` does not count what other processes take
        loop.clock = time.thread_time
    timed: dict[int, list[Round]] = {}
    with Locks(drafter).held(), closing(reader), closing(loop):
        loop.prefill()
        for turn in range(turns):
            for length in lengths:
                if len(loop.sequences) < texts:  # the context is full
                    return timed
                loop.draft_length = length
                (_, _, record), *_ = loop.round()
                is_whole = record.drafted == length
                if is_whole and (turn > 0 or not loop.sequences):  # the first ones allocate and choose kernels
                    timed.setdefault(length, []).append(record)
            if quick and turn + 1 >= LEAST_TURNS and all(map(_alike, timed.values())):
                break
    return timed


def _alike(rounds: list[Round]) -> bool:
    """Return whether the two fastest of these rounds took about as long."""
    best = sorted(record.seconds for record in rounds)[:2]
    return best[-1] < ALIKE * best[0]


@contextmanager
def _reading(model: PreTrainedModel, text: Sequence[int], *, compile: bool) -> Iterator[Callable[[int], None]]:
    """Return a function that reads a number of tokens after a context and then discards them."""
    limit = context_limit(model.config) or CONTEXT + WIDTHS[-1]
    tokens = _tokens(model.config, text, CONTEXT + WIDTHS[-1])
    longest = min(limit, CONTEXT + MOST_RECOMPUTED + WIDTHS[-1])
    runner = ModelRunner(model, 1, Plan(sources=[tokens[:8]], compile=compile, longest=longest))
    again = MOST_RECOMPUTED // 2 if is_recurrent(model) else 0
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
    with running(), _reading(model, text, compile=compile) as read:
        for repeat in range(REPEATS + 1):
            for width, measured in seconds.items():
                started = now(device)
                read(width)
                ended = now(device)
                if repeat > 0:  # the first pass allocates and chooses kernels
                    measured.append(ended - started)
    return {width: median(values) for width, values in seconds.items()}
