"""One round's drafts for every text: retrieved where the drafter can, otherwise grown by the policy, in lockstep."""

import torch

from draftsmith.decode.chance import SeededChance
from draftsmith.decode.growth import Growth
from draftsmith.decode.policies.policy import Growing, Policy
from draftsmith.decode.processors import Processors, Sampling
from draftsmith.decode.text import Text
from draftsmith.heads.draft import ROOT, Draft
from draftsmith.heads.drafter import Drafter

EXAMPLE = 8
"""Levels of an example."""


def propose(drafter: Drafter, policies: list[Policy | None], growths: list[Growth]) -> list[Draft]:
    """A draft for each text. Every step of the drafter serves all texts that still grow.

    A retrieved draft leaves its `Growth` empty.
    """
    drafts = [Draft() for _ in growths]
    growing: dict[int, Growing] = {}
    wanted: dict[int, list[int]] = {}

    def estimate(asked: list[list[int]]) -> None:
        """Hand the drafter's own guesses on to the policies."""
        for growth, nodes, chances in zip(growths, asked, drafter.chances(growths, asked) or (), strict=False):
            growth.estimates.update(zip(nodes, chances, strict=True))

    def advance(row: int, logits_nV: object) -> None:
        """Send logits to one text's policy (None starts it); note what it asks for next, or its draft."""
        try:
            wanted[row] = growing[row].send(logits_nV)
        except StopIteration as end:
            drafts[row] = end.value
            del growing[row]
            wanted.pop(row, None)

    for row, growth in enumerate(growths):
        if growth.room < 1:
            continue
        retrieved = drafter.retrieve(row, growth.room)
        if retrieved is not None:
            drafts[row] = retrieved
            continue
        if drafter.max_draft_length is not None:  # of what it grows: retrieval may know more at once
            growth.room = min(growth.room, drafter.max_draft_length)
        growing[row] = policies[row].grow(growth)
        advance(row, None)
    if not growing:
        return drafts
    assert all(nodes == [ROOT] for nodes in wanted.values()), "a policy asks for the root first"
    logits_BV = drafter.begin(list(growing))
    estimate([wanted.get(row, []) for row in range(len(growths))])
    for row in list(growing):
        advance(row, logits_BV[row][None])
    while growing:
        asked = [wanted.get(row, []) for row in range(len(growths))]
        logits = drafter.extend(growths, asked)
        estimate(asked)
        for row in list(growing):
            advance(row, logits[row])
    return drafts


def example_draft(policy: Policy, sharpness: float) -> Draft:
    """Return a draft that the policy grows at temperature 1 with a drafter whose logits are the same behind every node.

    `sharpness`: the difference between one logit and the next.
    """
    growth = Growth(Text([0], 2 + EXAMPLE, SeededChance(0)), EXAMPLE, Processors(Sampling(1.0)))
    logits_V = -sharpness * torch.arange(2.0 * EXAMPLE)
    growing = policy.fresh().grow(growth)
    try:
        nodes = next(growing)
        while True:
            nodes = growing.send(logits_V.expand(len(nodes), -1))
    except StopIteration as end:
        return end.value
