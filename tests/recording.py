"""Logits of a drafter in decoding, along tokens that a test chooses."""

from copy import copy

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.drafts.requests import Growing, Look, Request
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies.policy import Policy
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Level, TrainableDrafter
from draftsmith.heads.draft_tree import ROOT

Recorded = tuple[list[int], list[int], Tensor]
"""Committed tokens, the draft tokens after them, and the drafter's logits [V] there."""


class Recorder(Policy):
    """A policy that drafts given tokens and keeps the logits that it receives."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.logits = tokens, []

    def grow(self, builder: DraftBuilder) -> Growing:
        node = ROOT
        for token in self.tokens[: builder.room]:
            look: Look = yield Request([node], top=0)
            self.logits.append(look.logits_nV[0].clone())
            node = builder.choose(node, token)
        return builder.draft()


class Planned(Policy):
    """A policy whose drafts are a text's own greedy tokens for a planned number of levels a round, then wrong ones.

    With `siblings` each right token comes after a wrong one, so that accepted nodes are not the first ones.
    """

    def __init__(self, wholes: list[list[int]], plans: list[list[int]], depth: int, *, siblings: bool) -> None:
        self.wholes, self.plans, self.depth, self.siblings = wholes, plans, depth, siblings
        self.recorded: list[Recorded] = []
        self._rounds = 0

    def fresh(self) -> "Planned":
        return copy(self)  # with the same list, so that what all texts were shown is together

    def grow(self, builder: DraftBuilder) -> Growing:
        text = builder.sequence
        committed, right = list(text.tokens), self.plans[text.number][self._rounds]
        self._rounds += 1
        nodes, paths = [ROOT], [[]]
        for level in range(self.depth):
            look: Look = yield Request(nodes, top=0)
            logits_nV = look.logits_nV
            self.recorded += [
                (committed, path, logits_V) for path, logits_V in zip(paths, logits_nV.clone(), strict=True)
            ]
            token = self.wholes[text.number][len(committed) + level]
            wrong = (token + 7) % logits_nV.shape[-1]
            tokens = [wrong] if level >= right else [wrong, token] if self.siblings else [token]
            parent, before = nodes[-1], paths[-1]
            nodes = [builder.choose(parent, each) for each in tokens]
            paths = [[*before, each] for each in tokens]
        return builder.draft()


def planned_rounds(
    drafter: TrainableDrafter, target: LlamaForCausalLM, prompts: list[list[int]], policy: Planned
) -> list[Recorded]:
    """Decode the texts together for as many rounds as are planned, and check that drafts were accepted as planned."""
    texts = [DecodeSequence(list(prompt), len(prompt) + 40, number=n) for n, prompt in enumerate(prompts)]
    decoding = DecodeLoop(TransformersTarget(target), drafter, policy, texts, Processors(Sampling(0.0)))
    decoding.prefill()
    for _ in policy.plans[0]:
        decoding.round()
    assert [[record.accepted for record in text.rounds] for text in texts] == policy.plans[: len(texts)]
    return policy.recorded


class _Started(DecodeSequence):
    """A text whose first new token is `first`, whatever the target generates."""

    first: int

    def commit(self, new: list[int]) -> list[int]:
        return super().commit([self.first] if len(self.tokens) == self.prompt_length else new)


def decoded_logits(drafter: TrainableDrafter, target: LlamaForCausalLM, prompt: list[int], after: list[int]) -> Tensor:
    """Return [K, V]: the drafter's logits after `prompt` and along the tokens `after`, from the decoder."""
    policy = Recorder(after[1:])
    text = _Started(list(prompt), len(prompt) + 40)
    text.first = after[0]
    decoding = DecodeLoop(TransformersTarget(target), drafter, policy, [text], Processors(Sampling(0.0)))
    decoding.prefill()
    decoding.round()
    return torch.stack(policy.logits)


def decoded_confidences(drafter: TrainableDrafter, tokens: list[int]) -> list[Tensor]:
    """Return the drafter's own confidence after each of these draft tokens, after `decoded_logits`."""
    confidences = []
    for depth, token in enumerate(tokens, 1):
        drafter.extend(Level(torch.tensor([[token]]), None, depth))
        confidence_11 = drafter.confidences()
        confidences += [] if confidence_11 is None else [confidence_11[0, 0]]
    return confidences
