"""What a drafter says when the decoder asks it, along tokens that a test chooses."""

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.decode.chance import SeededChance
from draftsmith.decode.decoding import Decoding
from draftsmith.decode.growth import Growth
from draftsmith.decode.policies.policy import Growing
from draftsmith.decode.processors import Processors, Sampling
from draftsmith.decode.target import TransformersTarget
from draftsmith.decode.text import Text
from draftsmith.heads.draft import ROOT
from draftsmith.heads.drafter import TrainableDrafter


class Recorder:
    """A policy that drafts given tokens and keeps the logits that it was shown."""

    learns = False

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.logits = tokens, []

    def fresh(self) -> "Recorder":
        return self

    def grow(self, growth: Growth) -> Growing:
        node = ROOT
        for token in self.tokens[: growth.room]:
            logits_1V = yield [node]
            self.logits.append(logits_1V[0].clone())
            node = growth.choose(node, token)
        return growth.draft()

    def observe(self, *arguments: object) -> None:
        pass


def decoded_logits(drafter: TrainableDrafter, target: LlamaForCausalLM, prompt: list[int], behind: list[int]) -> Tensor:
    """[K, V]: what the drafter says behind `prompt` and along the tokens `behind`, by the decoder's own path."""
    policy = Recorder(behind[1:])
    text = Text(list(prompt), len(prompt) + 40, SeededChance(0))
    decoding = Decoding(TransformersTarget(target), drafter, policy, [text], Processors(Sampling(0.0)))
    decoding.prefill()
    if text.tokens[-1] != behind[0]:  # the target wrote another token: the test's text goes on as it was told
        text.tokens[-1] = behind[0]
    decoding.round()
    return torch.stack(policy.logits)
