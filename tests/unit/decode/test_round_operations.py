"""The work of a decoding round: of one text outside the models' forward passes, and of many texts, counted."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
from conftest import make_llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.policies import policy_named
from draftsmith.heads import HEADS, DraftModel

COSTS = Costs({1: 1.0, 8: 1.4, 32: 2.0}, {1: 0.1, 8: 0.12})
SHORT, LONG = 10, 60
"""Tokens of two runs, whose difference has no prompt and no end of a text."""


class Counted(TorchDispatchMode):
    """Counts calls of Python and C functions, and torch operators, while no forward pass of `models` runs."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.operators = self.calls = self._passes = 0
        self._models = models

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.operators += self._passes == 0
        return func(*args, **(kwargs or {}))

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += self._passes == 0 and event in ("call", "c_call")

    def _pause(self, passes: int) -> None:
        self._passes += passes

    @contextmanager
    def of_calls(self) -> Iterator[None]:
        """Count calls, for which no dispatch mode may run."""
        hooks = self._hooks()
        sys.setprofile(self._call)
        try:
            yield
        finally:
            sys.setprofile(None)
            for hook in hooks:
                hook.remove()

    @contextmanager
    def of_operators(self) -> Iterator[None]:
        hooks = self._hooks()
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hooks(self) -> list[Any]:
        before = [model.register_forward_pre_hook(lambda *_: self._pause(1), prepend=True) for model in self._models]
        after = [model.register_forward_hook(lambda *_: self._pause(-1)) for model in self._models]
        return before + after


def of_a_round(policy: str | None, temperature: float) -> tuple[float, float]:
    """Return calls and operators of one round."""
    target, draft_model = make_llama(), make_llama(num_hidden_layers=1)
    chosen = {} if policy is None else {"policy": policy_named(policy, COSTS)}
    decoder = SpeculativeDecoder(target, None if policy is None else DraftModel(draft_model), **chosen)
    counted, counts = Counted(target, draft_model), []
    for tokens in (SHORT, SHORT, LONG):  # the first run fills the tables of functions that are called once
        counted.calls = counted.operators = 0
        rounds = 0
        for counting in (counted.of_calls, counted.of_operators):
            with counting():
                output = decoder.generate([5, 9, 33], max_new_tokens=tokens, temperature=temperature, eos_token_id=None)
            rounds = len(output.rounds)
        counts.append((rounds, counted.calls, counted.operators))
    rounds, calls, operators = (long - short for short, long in zip(counts[1], counts[2], strict=True))
    return calls / rounds, operators / rounds


@pytest.mark.parametrize(
    ("policy", "temperature", "most_calls", "most_operators"),
    [
        (None, 0.0, 135, 12),
        (None, 1.0, 205, 28),
        ("chain:draft_length=4", 0.0, 515, 37),
        ("chain:draft_length=4", 1.0, 680, 156),
        ("adaptive", 0.0, 460, 25),
        ("adaptive", 1.0, 890, 159),
        ("optimal-tree", 0.0, 605, 25),
        ("optimal-tree", 1.0, 1290, 235),
    ],
)
def test_work_of_a_round(policy: str | None, temperature: float, most_calls: int, most_operators: int) -> None:
    """The limits are 5 % above the counts of the time when they were set."""
    calls, operators = of_a_round(policy, temperature)
    assert operators <= most_operators, f"{operators:.1f} operators a round, {calls:.0f} calls"
    assert calls <= most_calls, f"{calls:.0f} calls a round, {operators:.1f} operators"


HEAD_OPTIONS: dict[str, dict[str, Any]] = {"medusa": {"num_heads": 4}, "peagle": {"num_tokens": 4}}
HEAD_OPTIONS |= {"hydra": {"num_heads": 4, "prefix_layer": True}, "dflash": {"block_size": 5}}


GROWN = ("dynamic-tree:size=8,depth=3,top_k=3", "confidence:threshold=0.03,draft_length=4")
"""Policies whose drafts depend on q, so that texts have drafts of different shapes and lengths."""


class Enough(Exception):
    """Ends decoding when enough rounds were counted."""


def operators_of_a_batch(kind: str, policy: str, temperature: float, batch: int) -> float:
    """Return the operators of a round of several texts of different lengths, those of the models included."""
    target = make_llama(num_hidden_layers=4)
    torch.manual_seed(1)
    drafter = HEADS[kind].from_target(target, **HEAD_OPTIONS.get(kind, {})).eval()
    for parameter in drafter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # so that texts accept different numbers of tokens
    decoder = SpeculativeDecoder(target, drafter, policy=policy_named(policy, COSTS))
    counted, after = Counted(), list[int]()

    def note(row: int, tokens: list[int], record: object) -> None:
        if row == 0:
            after.append(counted.operators)
        if len(after) == 6:
            raise Enough

    prompts = [[5 + row, *range(2, 5 + row % 3)] for row in range(batch)]
    settings = {"max_new_tokens": 28, "temperature": temperature, "eos_token_id": None}
    with counted.of_operators(), suppress(Enough):
        decoder.generate_batch(prompts, on_tokens=note, **settings)
    return (after[5] - after[1]) / 4  # no text ends before: a round commits at most 5 tokens


@pytest.mark.parametrize(
    ("kind", "policy", "temperature"),
    [
        *((kind, "chain:draft_length=4", 0.0) for kind in ("eagle", "eagle3", "mtp", "medusa")),
        *((kind, "chain:draft_length=4", 0.0) for kind in ("hydra", "peagle", "dflash")),
        *(
            (kind, policy, 1.0)
            for kind in ("eagle3", "medusa")
            for policy in ("chain:draft_length=4", "tree:widths=2x1")
        ),
        *((kind, policy, t) for kind in ("eagle3", "medusa") for policy in GROWN for t in (0.0, 1.0)),
    ],
)
def test_operators_of_a_round_do_not_grow_with_the_batch(kind: str, policy: str, temperature: float) -> None:
    """One text needs no masks and indices of rows of different lengths; sixteen need what four do.

    Each sampled text has a generator of its own, of which a round reads one block, and one more for each token that a
    policy draws before it decides about the next one. A few operators are left out where all texts happen to agree:
    indices of the accepted nodes and of the last tokens, moves of each layer's slots.
    """
    one, four, sixteen = (operators_of_a_batch(kind, policy, temperature, batch) for batch in (1, 4, 16))
    blocks = 12 * (5 if policy == GROWN[1] else 1) if temperature > 0 else 0
    agreeing = 25 if "tree" in policy else 6
    assert sixteen - four <= blocks + agreeing, f"{one:.1f}, {four:.1f} and {sixteen:.1f} operators a round"
    assert sixteen <= 1.3 * one + blocks, f"{one:.1f}, {four:.1f} and {sixteen:.1f} operators a round"
