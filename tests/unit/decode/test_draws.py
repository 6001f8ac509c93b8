"""A text draws the same numbers alone and in a batch, and for drafts that are built at once or grown."""

from collections.abc import Sequence

import pytest
import torch
from conftest import make_llama, spread
from exact.wrong_rules import of_text
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from draftsmith.decode.cache.committed import CommittedTokens
from draftsmith.decode.drafts.builder import DraftBuilder
from draftsmith.decode.draws import seeded_draws
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import ConfidenceChain, policy_named
from draftsmith.decode.proposer import Proposer
from draftsmith.decode.rules import RULES
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.rows import Counts

VOCAB = 9


class Table(Drafter):
    """Logits that depend on the text and on the path."""

    type = "table"

    def begin(self, rows: list[int]) -> Tensor:
        self._seen = torch.tensor([[sum(text.tokens)] for text in self.context.sequences])
        return self._logits()[:, 0]

    def extend(self, level: Level) -> Tensor:
        above = self._seen if level.parents_Bn is None else self._seen.gather(1, level.parents_Bn)
        self._seen = 7 * above + level.tokens_Bn + 1
        return self._logits()

    def _logits(self) -> Tensor:
        rows = [[torch.Generator().manual_seed(int(seen)) for seen in row] for row in self._seen.tolist()]
        return torch.stack(
            [torch.stack([2 * torch.randn(VOCAB, dtype=torch.float64, generator=one) for one in row]) for row in rows]
        )


class Context:
    def __init__(self, texts: list[DecodeSequence]) -> None:
        self.sequences = texts


class Forbidding(LogitsProcessor):
    """Forbids every token after some texts, and many after all others."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores.masked_fill_(input_ids.sum(1, keepdim=True) % 4 == 0, -torch.inf)


READING = (RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2))
SETTINGS = {"greedy": (Sampling(0.0), ()), "sampled": (Sampling(1.0), ()), "top-k": (Sampling(1.0, top_k=2), ())}
SETTINGS |= {"reads the text": (Sampling(0.8), READING), "greedy, reads the text": (Sampling(0.0), READING)}
SETTINGS |= {"forbids": (Sampling(1.0), (Forbidding(),)), "greedy, forbids": (Sampling(0.0), (Forbidding(),))}


@pytest.mark.parametrize("setting", SETTINGS)
def test_chains_on_the_device_are_those_that_the_policy_grows(setting: str) -> None:
    sampling, extra = SETTINGS[setting]
    prompts = [[3, 1, 4], [1, 5], [2, 6, 5, 3, 5, 8], [7]]
    rooms = Counts([3, 1, 2, 0], torch.device("cpu"))
    texts = [DecodeSequence(prompt, 40, number, number=number) for number, prompt in enumerate(prompts)]
    processors, drafter = Processors(sampling, extra, sequences=len(texts)), Table()
    drafter.start(Context(texts))
    committed = CommittedTokens(prompts, torch.device("cpu"))
    draws = seeded_draws(range(len(texts)), [len(prompt) for prompt in prompts], torch.device("cpu"))
    drawn = None if processors.greedy else draws
    proposer = Proposer(drafter, processors)
    batch = proposer.chains(texts, rooms, 3, drawn, committed)
    builders = [DraftBuilder(text, room, processors) for text, room in zip(texts, rooms, strict=True)]
    policies = [ConfidenceChain(0.0, 3)] * len(texts)
    grown = proposer.build(policies, builders, [None] * len(texts), draws)
    for row, expected in enumerate(grown):
        draft, _ = of_text(batch, row)
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        assert draft.drawn == expected.drawn or not expected.tokens
        if draft.drawn and expected.drawn:
            assert all(map(torch.equal, draft.q, expected.q))


WHOLE_DECODES = [
    (None, None),
    *(("chain:draft_length=3", rule) for rule in ("token", "block", "point-mass", "typical")),
    ("confidence:threshold=0.1", None),
    ("best-first:size=9,depth=3", None),
    ("best-first:size=8,depth=3", None),
    *(("sampled-tree", rule) for rule in ("token", "point-mass")),
]


@pytest.mark.parametrize(("plan", "top_k"), spread(WHOLE_DECODES, [None, 2]), ids=str)
def test_texts_of_a_batch_are_those_of_each_alone(
    plan: tuple[str | None, str | None], top_k: int | None, tiny_target: LlamaForCausalLM
) -> None:
    """Their drafts have other shapes and lengths, and they end in other rounds."""
    policy, rule = plan
    noisy = make_llama()
    torch.manual_seed(3)
    for parameter in noisy.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    drafter = None if policy is None else DraftModel(noisy)
    prompts = [[5, 9, 33], [7, 8, 9, 10], [40]]

    def decoded(numbers: Sequence[int]) -> list[tuple]:
        rows = [DecodeSequence(list(prompts[n]), len(prompts[n]) + 30 + n, n, number=n) for n in numbers]
        made, own = None if policy is None else policy_named(policy), rule and RULES[rule]
        processors = Processors(Sampling(1.0, top_k))
        with torch.inference_mode():
            decoding = DecodeLoop(TransformersTarget(tiny_target), drafter, made, rows, processors, own)
            decoding.prefill()
            while decoding.sequences:
                decoding.round()
        for record in (record for row in rows for record in row.rounds):
            if policy is not None and policy.startswith("chain") and rule != "typical":
                assert record.tested == min(record.accepted + 1, record.drafted)
                assert record.depth == record.drafted, "also where the end of a text cuts it"
        return [(row.tokens, [(r.drafted, r.accepted) for r in row.rounds]) for row in rows]

    together = decoded(range(3))
    assert together == [decoded([number])[0] for number in range(3)]
    assert policy is None or sum(accepted for _, rounds in together for _, accepted in rounds) >= 2
