"""Draws for several texts at once equal the draws of each text alone, and so do drafts that are built at once."""

from collections.abc import Callable

import pytest
import torch
from conftest import make_llama
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from draftsmith.decode.cache.committed import CommittedTokens
from draftsmith.decode.draft_builder import DraftBuilder
from draftsmith.decode.draws import Draws, RowDraws, SeededDraws
from draftsmith.decode.fixed_drafts import FixedDrafts
from draftsmith.decode.grown_drafts import propose
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain, StaticTree, policy_named, widths_shape
from draftsmith.decode.policies.base import FixedPolicy
from draftsmith.decode.sampling import Processors, Sampling, SeededRng
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.decode.verification import RULES
from draftsmith.heads.base import Drafter, Level
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft, DraftBatch, DrawnDraft

ROWS, VOCAB = 6, 9
TREE = (-1, -1, 0, 0, 1, 2)
CHAIN = (-1, 0, 1)


def weights(*shape: int) -> Tensor:
    """Return weights, a third of them zero."""
    drawn = torch.rand(*shape, VOCAB, dtype=torch.float64)
    return (drawn * (torch.rand(*shape, VOCAB) > 0.3)).index_fill_(-1, torch.tensor([2]), 0.1)


def some() -> Tensor:
    return torch.rand(ROWS) > 0.4


def along(parents: tuple[int, ...], valid: bool) -> Callable[[Draws], Tensor]:
    weights_BPV, tokens_BN = weights(ROWS, len(parents) + 1), torch.randint(3, (ROWS, len(parents)))
    valid_BN = torch.rand(ROWS, len(parents)) > 0.3 if valid else None
    batch = DraftBatch(tokens_BN, parents, valid_BN)

    def path(draws: Draws) -> Tensor:
        """Return the tokens on the path of each row, then -1."""
        found, out = draws.along(weights_BPV, batch), []
        for row, tokens in enumerate(found.tolist()):
            place, path = 0, []
            while place is not None:
                path.append(tokens[place])
                nodes = [n for n, parent in enumerate(parents) if parent + 1 == place and tokens_BN[row, n] == path[-1]]
                nodes = [n for n in nodes if valid_BN is None or valid_BN[row, n]]
                place = nodes[0] + 1 if nodes else None
            out.append(path + [-1] * (len(parents) + 1 - len(path)))
        return torch.tensor(out)

    return path


def operations(seed: int) -> list[Callable[[Draws], Tensor]]:
    """Return draws of every kind with random arguments; the last one is along a path."""
    torch.manual_seed(seed)
    active, flips = some(), some()
    probability_B, probability_BN, valid_BN = torch.rand(ROWS), torch.rand(ROWS, 4), torch.rand(ROWS, 4) > 0.4
    all_BV, some_BV = weights(ROWS), weights(ROWS)
    last = along([CHAIN, TREE][seed % 2], valid=seed % 3 == 0)
    middle: list[Callable[[Draws], Tensor]] = [
        lambda draws: draws.categorical(some_BV, active).masked_fill(~active, -1),
        lambda draws: draws.bernoulli(probability_B, flips) & flips,
        lambda draws: draws.first(probability_BN, seed % 2 == 0),
        lambda draws: draws.first(probability_BN, seed % 2 == 1, valid_BN),
    ]
    order = torch.randperm(len(middle)).tolist()[: seed % 5]
    return [lambda draws: draws.categorical(all_BV), *(middle[place] for place in order), last]


@pytest.mark.parametrize("seed", range(40))
def test_rows_draw_what_each_source_draws_alone(seed: int) -> None:
    together, alone = ([SeededRng(100 * seed + row) for row in range(ROWS)] for _ in range(2))
    at_once, one_by_one = SeededDraws(together, 40, torch.device("cpu")), RowDraws(alone)
    *before, last = operations(seed)
    for operation in before:
        assert operation(at_once).tolist() == operation(one_by_one).tolist()
    made = [at_once.made] * ROWS if at_once.made_B is None else at_once.made_B.tolist()
    for rng, other, count in zip(together, alone, made, strict=True):
        rng.skip(count)
        assert rng.block(3).tolist() == other.block(3).tolist(), "as many numbers were taken from the source"
    assert last(at_once).tolist() == last(one_by_one).tolist()


class Table(Drafter):
    """Logits that depend on the text and on the path."""

    type = "table"

    def begin(self, rows: list[int]) -> Tensor:
        self._seen = torch.tensor([[sum(text.tokens)] for text in self.context.texts])
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
        self.texts = texts


class Forbidding(LogitsProcessor):
    """Forbids every token after some texts, and many after all others."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores.masked_fill_(input_ids.sum(1, keepdim=True) % 4 == 0, -torch.inf)


READING = (RepetitionPenaltyLogitsProcessor(1.4), NoRepeatNGramLogitsProcessor(2))
POLICIES = [
    Chain(3),
    StaticTree(widths_shape((3, 2, 1))),
    StaticTree(((0,), (1,), (2,), (1, 0), (1, 0, 0))),
]
SETTINGS = {
    "greedy": (Sampling(0.0), ()),
    "sampled": (Sampling(1.0), ()),
    "top-k": (Sampling(1.0, top_k=2), ()),
    "reads the text": (Sampling(0.8), READING),
    "greedy, reads the text": (Sampling(0.0), READING),
    "forbids": (Sampling(1.0), (Forbidding(),)),
    "greedy, forbids": (Sampling(0.0), (Forbidding(),)),
}


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("setting", SETTINGS)
def test_drafts_of_fixed_shape_are_those_that_the_policy_grows(policy: FixedPolicy, setting: str) -> None:
    sampling, extra = SETTINGS[setting]
    prompts, rooms = [[3, 1, 4], [1, 5], [2, 6, 5, 3, 5, 8], [7]], [3, 1, 2, 0]
    texts = [DecodeSequence(prompt, 40, SeededRng(number), number=number) for number, prompt in enumerate(prompts)]
    processors, drafter = Processors(sampling, extra, texts=len(texts)), Table()
    drafter.start(Context(texts))
    committed = CommittedTokens(prompts, torch.device("cpu"))
    draws = RowDraws([SeededRng(number) for number in range(len(texts))])
    shape = policy.fixed(greedy=processors.greedy)
    batch = FixedDrafts(shape, rooms, processors, draws, committed, range(len(texts)), None).build(drafter)
    builders = [DraftBuilder(text, room, processors) for text, room in zip(texts, rooms, strict=True)]
    grown = propose(drafter, [policy] * len(texts), builders, [None] * len(texts))
    for row, expected in enumerate(grown):
        draft, _ = batch.of_text(row)
        if not batch.drawn and setting != "sampled":  # candidates without probability are not left out
            assert set(_paths(expected)) <= set(_paths(draft))
            continue
        assert (draft.tokens, draft.parents) == (expected.tokens, expected.parents)
        assert isinstance(draft, DrawnDraft) == isinstance(expected, DrawnDraft) or not expected.tokens
        if isinstance(draft, DrawnDraft) and isinstance(expected, DrawnDraft):
            assert all(map(torch.equal, draft.q, expected.q))


def _paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node."""
    return [tuple(draft.tokens[step] for step in draft.path(node)) for node in range(len(draft))]


class OneByOne(SeededRng):
    """The same numbers; the decoder knows no other source than `SeededRng` itself that it may read in blocks."""


WHOLE_DECODES = [
    (None, None),
    ("chain:draft_length=3", "token"),
    ("chain:draft_length=3", "block"),
    ("chain:draft_length=3", "point-mass"),
    ("confidence:threshold=0.1", None),
    ("tree:widths=3x2x1", None),
    *(("sampled-tree", rule) for rule in ("traversal", "siblings-without-replacement", "point-mass")),
]


@pytest.mark.parametrize(("policy", "rule"), WHOLE_DECODES)
@pytest.mark.parametrize("cuts", [{}, {"top_k": 2}], ids=["all tokens", "top-k"])
def test_texts_are_those_of_draws_one_by_one(
    policy: str | None, rule: str | None, cuts: dict[str, int], tiny_target: LlamaForCausalLM
) -> None:
    """Every number is drawn once and in the same order; a number that is used twice would bias the texts."""
    noisy = make_llama()
    torch.manual_seed(3)
    for parameter in noisy.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    texts = []
    for source in (SeededRng, OneByOne):
        prompts = [[5, 9, 33], [7, 8, 9, 10], [40]]
        rows = [DecodeSequence(p, len(p) + 30 + n, source(n), number=n) for n, p in enumerate(prompts)]
        drafter = None if policy is None else DraftModel(noisy)
        plan = None if policy is None else policy_named(policy)
        with torch.inference_mode():
            decoding = DecodeLoop(
                TransformersTarget(tiny_target),
                drafter,
                plan,
                rows,
                Processors(Sampling(1.0, **cuts)),
                rule and RULES[rule],
            )
            decoding.prefill()
            while decoding.texts:
                decoding.round()
        texts.append([(row.tokens, [(r.drafted, r.accepted, r.overlap) for r in row.rounds]) for row in rows])
        records = [record for row in rows for record in row.rounds]
        assert policy is None or sum(record.accepted for record in records) > 2
        if policy is not None and policy.startswith("chain"):
            assert all(record.tested == min(record.accepted + 1, record.drafted) for record in records)
            assert all(record.depth == record.drafted for record in records), "also where the end of a text cuts it"
            assert len({record.drafted for record in records}) > 1
    assert texts[0] == texts[1]
