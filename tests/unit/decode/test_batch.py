"""Batches: each text equals the text that is decoded alone."""

from collections import Counter
from itertools import product

import pytest
import torch
from conftest import make_llama, mostly_slow, noisy_llama, spread
from half_precision import require_greedy
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.draws import Draws, seeded_draws
from draftsmith.decode.fastest import fastest_decoder
from draftsmith.decode.loop import DecodeLoop
from draftsmith.decode.policies import Chain, policy_named
from draftsmith.decode.sampling import Processors, Sampling
from draftsmith.decode.sequence import DecodeOutput, DecodeSequence, Round
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads import HEADS
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.retrieval import Hybrid
from draftsmith.heads.rows import Counts

PROMPTS = [[5, 9, 33, 2], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [3, 3, 3, 3, 3], [12, 50]]
POLICIES = ("chain", "confidence:threshold=0.2", "adaptive", "best-first", "sampled-tree")
COSTS = Costs({1: 1.0, 4: 1.2, 16: 2.0}, {1: 0.1})
"""Not measured, so that policies that plan draft the same on all machines."""


def drafter(kind: str, target: LlamaForCausalLM) -> Drafter | None:
    if kind == "medusa":
        return Medusa.from_target(target, num_heads=3)
    noisy = noisy_llama(0.1)
    return {"none": None, "draft_model": DraftModel(noisy), "hybrid": Hybrid(DraftModel(noisy), min_match=2)}[kind]


@pytest.mark.parametrize(
    ("case", "temperature"), spread(product(["draft_model", "medusa", "hybrid"], POLICIES), [0.0, 1.0]), ids=str
)
def test_each_text_equals_the_text_decoded_alone(
    tiny_target: LlamaForCausalLM, case: tuple[str, str], temperature: float
) -> None:
    kind, policy = case
    decoder = SpeculativeDecoder(tiny_target, drafter(kind, tiny_target), policy=policy_named(policy, COSTS))
    settings = {"max_new_tokens": 40, "temperature": temperature, "eos_token_id": [1, 19, 20]}
    together = decoder.generate_batch(PROMPTS, seeds=100, **settings)
    for number, (prompt, out) in enumerate(zip(PROMPTS, together, strict=True)):
        alone = decoder.generate(prompt, seed=100 + number, **settings)
        assert out.tokens == alone.tokens
        assert [record.accepted for record in out.rounds] == [record.accepted for record in alone.rounds]
        overlaps = [[value for record in text.rounds for value in record.overlap] for text in (out, alone)]
        assert overlaps[0] == pytest.approx(overlaps[1], abs=1e-5)
    assert len({len(out.tokens) for out in together}) > 1, "the texts should end at different times"


class PairsOfTokens(StoppingCriteria):
    """Ends a text after one of three pairs: at different times, also inside of drafts."""

    def __call__(self, input_ids: torch.LongTensor, scores: object, **_: object) -> bool:  # pyright: ignore
        return input_ids[0, -2:].tolist() in ([0, 1], [2, 3], [5, 5])


@pytest.mark.parametrize("kind", mostly_slow(["dflash", "mtp", "mtp of 3 modules"], "dflash", "mtp of 3 modules"))
def test_the_default_policy_in_ragged_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds with retrieved drafts, with those of the drafter and without any, while texts end: tokens and records."""
    target = make_llama(vocab_size=8, num_hidden_layers=3, initializer_range=0.25).double()
    torch.manual_seed(0)
    options = {"dflash": {"block_size": 4, "layers": [1, 2]}, "mtp": {}, "mtp of 3 modules": {"num_modules": 3}}[kind]
    drafter = HEADS[kind.split()[0]].from_target(target, **options).double().eval()
    costs = Costs({1: 1.0, 2: 1.5, 16: 9.0}, {1: 0.2})  # a draft pays now and then
    decoder = fastest_decoder(target, drafter, costs=costs, batch_size=6)
    found: Counter[bool] = Counter()
    retrieve = Hybrid.retrieve

    def counted(own: Hybrid, row: int, room: int) -> Draft | None:
        draft = retrieve(own, row, room)
        found[draft is not None] += 1
        return draft

    monkeypatch.setattr(Hybrid, "retrieve", counted)
    settings = {"max_new_tokens": 80, "eos_token_id": None, "temperature": 1.3, "stopping_criteria": [PairsOfTokens()]}
    empty = rounds = 0
    for first in (0, 100, 200):
        prompts = [[(first // 100 + 3 * i + 5 * j) % 8 for i in range(2 + 3 * j)] for j in range(6)]
        for number, out in enumerate(decoder.generate_batch(prompts, seeds=first, **settings)):
            alone = decoder.generate(prompts[number], seed=first + number, **settings)
            assert out.tokens == alone.tokens
            assert records(out) == records(alone)
            rounds += len(out.rounds)
            empty += sum(record.drafted == 0 for record in out.rounds)
    assert min(empty, rounds - empty, found[True], found[False]) > 10, "every kind of round"


def records(out: DecodeOutput) -> list[tuple[object, ...]]:
    """Return the records of a text without their seconds."""
    return [(r.drafted, r.depth, r.accepted, r.committed, [round(v, 9) for v in r.overlap]) for r in out.rounds]


@pytest.mark.parametrize(
    ("policy", "temperature"),
    spread(["chain:draft_length=3", "best-first:size=6,depth=3", "adaptive", None], [0.0, 1.0]),
)
def test_records_count_what_was_drafted_beside_processors(
    tiny_target: LlamaForCausalLM, policy: str | None, temperature: float
) -> None:
    """The flag of rows in which processors forbid every token is no draft token."""
    model = None if policy is None else drafter("draft_model", tiny_target)
    decoder = SpeculativeDecoder(tiny_target, model, policy=policy)
    settings = {"max_new_tokens": 12, "temperature": temperature, "eos_token_id": None}
    plain = decoder.generate_batch(PROMPTS, **settings)
    same = decoder.generate_batch(PROMPTS, logits_processor=[RepetitionPenaltyLogitsProcessor(1.0)], **settings)
    for out, other in zip(plain, same, strict=True):
        assert out.tokens == other.tokens
        counts = [[(r.drafted, r.depth, r.accepted, r.committed) for r in text.rounds] for text in (out, other)]
        assert counts[0] == counts[1]


def test_the_stream_names_the_text_of_new_tokens(tiny_target: LlamaForCausalLM) -> None:
    seen: list[list[int]] = [[] for _ in PROMPTS]

    def on_tokens(number: int, tokens: list[int], _: Round | None) -> None:
        seen[number] += tokens

    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama(1)))
    outputs: list[DecodeOutput] = decoder.generate_batch(PROMPTS, max_new_tokens=20, on_tokens=on_tokens)
    assert seen == [out.tokens for out in outputs]


def test_half_precision_in_a_batch(tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(tiny_target.bfloat16(), DraftModel(make_llama(1).bfloat16()), policy="best-first")
    texts = decoder.generate_batch(PROMPTS, max_new_tokens=20, eos_token_id=None)
    for prompt, out in zip(PROMPTS, texts, strict=True):
        assert len(out.tokens) == 20
        require_greedy(tiny_target, prompt, out.tokens)


@torch.inference_mode()
def test_numbers_of_a_round_are_drawn_for_the_texts_that_are_left(tiny_target: LlamaForCausalLM) -> None:
    """With their seeds and lengths, on the host and on the device: rounds of equal lengths would use equal numbers."""
    prompts, lengths = [[5, 9, 33], [7], [40, 3]], [12, 8, 25]
    pairs = enumerate(zip(prompts, lengths, strict=True))
    texts = [DecodeSequence(prompt, most, 7 + number, number=number) for number, (prompt, most) in pairs]
    drafter, target = DraftModel(make_llama()), TransformersTarget(tiny_target)
    loop = DecodeLoop(target, drafter, Chain(2), texts, Processors(Sampling(1.0)))
    asked = 0

    def draws_of(seeds: Counts, lengths: Counts, device: torch.device) -> Draws:
        nonlocal asked
        asked += 1
        assert seeds.on_device_B.tolist() == list(seeds) == [text.seed for text in loop.sequences]
        assert lengths.on_device_B.tolist() == list(lengths) == [len(text.tokens) for text in loop.sequences]
        return seeded_draws(seeds, lengths, device)

    loop.draws_of = draws_of
    loop.prefill()
    while loop.sequences:
        loop.round()
    assert asked > 8
