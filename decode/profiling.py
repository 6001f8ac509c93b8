"""Measures the seconds of forward passes of a target and a drafter on this machine, for `Costs`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.decode.clock import now
from draftsmith.decode.costs import Costs
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.locks import Locks
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.passes.base import Plan
from draftsmith.decode.passes.recurrent import MOST_AGAIN, is_recurrent
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies.base import Chain, Growing, Policy, grow_chain
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_tree import Parents
from draftsmith.heads.model_config import context_limit, plain_model, require_in_memory

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
CONTEXT, REPEATS = 128, 7
SHORT, LONG = 1, 7
TURNS, ROUNDS = 6, 5
"""Whole rounds are timed with chains of SHORT and LONG tokens, TURNS times alternately, ROUNDS rounds each time. The
target reads 2 and 8 tokens then, to which compiled passes add no padding."""
PROBED = (0, 1, 3, 7)
"""Lengths of the drafts of `quick_costs`, in turn."""
SHARED_CONTEXT = 32
"""Tokens of each text of a batch in `quick_costs`."""
LEAST_TURNS, MOST_TURNS, ALIKE = 3, 8, 1.1
"""`quick_costs` goes through them three times, the first time to warm up, and on until the two fastest rounds of every
length differ by a tenth at most, as they do unless other processes take the processor."""
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
    does not depend on the number of steps and becomes `Costs.round` and `Costs.first`.

    Args:
        compile: time compiled passes, whose widths are powers of two.
        verify: the target's seconds, if they are known.
        text: tokens that are read, such as those of a prompt; by default different ones of the vocabulary. A mixture of
            experts reads the more weights, the more its tokens differ.
    """
    target = plain_model(target)
    require_in_memory(target)
    verify = verify or _curve(target, compile, text)
    if drafter is None or drafter.only_retrieves:
        return Costs(verify, {1: min(verify.values()) * NEARLY_FREE})
    model = getattr(drafter, "model", None)
    draft = {1: 0.0}
    if isinstance(model, nn.Module):
        draft = _curve(cast(PreTrainedModel, model), compile, text)  # a draft model's
    alone = Costs(verify, draft)
    reach = min(LONG, drafter.max_draft_length or LONG)
    seconds: dict[int, list[Round]] = {SHORT: [], reach: []}
    for _ in range(TURNS):  # alternately, so that a slow phase of the machine affects both
        for length, rounds in seconds.items():
            rounds += _rounds(target, drafter, length, compile, text)
    short, long = (median(record.seconds for record in seconds[length]) for length in (SHORT, reach))
    step = draft[1]
    if reach > SHORT:
        check = alone.verify_seconds(reach + 1) - alone.verify_seconds(SHORT + 1)
        step = max((long - short - check) / (reach - SHORT), verify[1] * NEARLY_FREE)
    fixed = max(short - step - alone.verify_seconds(SHORT + 1), 0.0)
    drafting = median(record.draft_seconds for record in seconds[SHORT])
    first = min(max(drafting - step, 0.0), fixed)
    draft = {width: step + max(value - draft[1], 0.0) for width, value in draft.items()}
    return Costs(verify, draft, fixed - first, first)


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


@contextmanager
def _sampling(
    target: PreTrainedModel, drafter: Drafter, policy: Policy, rounds: int, plan: Plan, prompts: Sequence[Sequence[int]]
) -> Iterator[tuple[DecodeLoop, "Timed"]]:
    """Return a loop over sampled texts with room for this number of rounds, whose prompts have been read."""
    configs = [getattr(model, "config", None) for model in (target, getattr(drafter, "model", None))]
    limits = [None if config is None else context_limit(config) for config in configs]
    limit = min(CONTEXT * 4 if limit is None else limit for limit in limits)
    most = rounds * (LONG + 1) + 2
    length = max(1, min(len(prompts[0]), limit - most))
    end, encodes = min(length + most, limit), target.config.is_encoder_decoder
    sequences = [
        DecodeSequence([*prompt[:length]], end, number, source=[*prompt[:8]] if encodes else [], number=number)
        for number, prompt in enumerate(prompts)
    ]
    reader, processors = Timed(target, plan=plan), Processors(Sampling(1.0), texts=len(prompts))
    device = next(target.parameters()).device
    reader.clock = time.thread_time if device.type == "cpu" else partial(now, device)
    loop = DecodeLoop(reader, drafter, policy, sequences, processors, compile=plan.compile)
    with Locks(target, drafter).held(), closing(reader), closing(loop):
        loop.prefill()
        yield loop, reader


def _rounds(
    target: PreTrainedModel, drafter: Drafter, draft_length: int, compile: bool, text: Sequence[int]
) -> list[Round]:
    """Return the records of a few rounds with `draft_length` tokens, without the first, which allocates."""
    records: list[Round] = []
    prompts = [_tokens(target.config, text, CONTEXT)]
    with _sampling(target, drafter, Chain(draft_length), ROUNDS, Plan(compile=compile), prompts) as (loop, _):
        while loop.texts and len(records) < ROUNDS:
            records += [record for _, _, record in loop.round()]
    return records[1:] or records


class InTurn(Policy):
    """Chains of these lengths, one after the other and from the start again, built as `adaptive` builds them."""

    name: ClassVar[str] = "in-turn"
    branches: ClassVar[bool] = False

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths, self._next = lengths, cycle(lengths)

    def fresh(self) -> "InTurn":
        return InTurn(self._lengths)

    def grow(self, builder: DraftBuilder) -> Growing:
        return grow_chain(builder, next(self._next))


class Timed(TransformersTarget):
    """Notes when it begins to verify, in seconds of `clock`."""

    clock: Callable[[], float]
    began: float

    def verify(self, tokens_BQ: Tensor, shapes: Sequence[Parents]) -> Tensor:
        self.began = self.clock()
        return super().verify(tokens_BQ, shapes)


@torch.inference_mode()
def quick_costs(target: PreTrainedModel, drafter: Drafter, *, texts: int = 1, invariant: bool = False) -> Costs:
    """Return a text's share in the seconds of passes over `texts` texts, from twelve rounds or a few more.

    Less precise than `measure_costs`. The drafts of a round have one length; of each length the fastest round counts.
    On a CPU the seconds are those in which this thread had the processor, so that other processes matter little.
    """
    reach = min(PROBED[-1], drafter.max_draft_length or PROBED[-1])
    lengths = sorted({min(length, reach) for length in PROBED})
    seconds: dict[int, list[tuple[float, float]]] = {}
    """By the length of the draft: of a round without and with its draft."""
    plan, count = Plan(invariant=invariant), MOST_TURNS * len(lengths)
    prompts = [_tokens(target.config, (), CONTEXT if texts == 1 else SHARED_CONTEXT)] * texts
    with _sampling(target, drafter, InTurn(lengths), count, plan, prompts) as (loop, reader):
        for turn in range(MOST_TURNS):
            for _ in lengths:
                if len(loop.texts) < texts:  # the context is full
                    break
                begun = reader.clock()
                (_, _, record), *_ = loop.round()
                total, drafting = reader.clock() - begun, reader.began - begun
                if turn > 0 or not loop.texts:  # the first ones allocate and choose kernels
                    seconds.setdefault(record.drafted, []).append(((total - drafting) / texts, total / texts))
            if turn + 1 >= LEAST_TURNS and all(map(_alike, seconds.values())):
                break
    if not seconds:
        return Costs({1: 1.0}, {1: 1.0})  # no text has room for two rounds
    verify = {length + 1: min(rest for rest, _ in own) for length, own in seconds.items()}
    draft = {length: min(total - rest for rest, total in own) for length, own in seconds.items() if length}
    least, short, long = min(verify.values()) * NEARLY_FREE, min(draft, default=0), max(draft, default=0)
    if not draft:
        return Costs(verify, {1: least})
    step = (draft[long] - draft[short]) / (long - short) if long > short else draft[short] / short
    step = max(step, least)
    return Costs(verify, {1: step}, first=max(draft[short] - short * step, 0.0))


def _alike(seconds: list[tuple[float, float]]) -> bool:
    """Return whether the two fastest of these rounds took about as long."""
    best = sorted(total for _, total in seconds)[:2]
    return best[-1] < ALIKE * best[0]


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
    with Locks(model, None).running(), _reading(model, text, compile=compile) as read:
        for repeat in range(REPEATS + 1):
            for width, measured in seconds.items():
                started = now(device)
                read(width)
                ended = now(device)
                if repeat > 0:  # the first pass allocates and chooses kernels
                    measured.append(ended - started)
    return {width: median(values) for width, values in seconds.items()}
