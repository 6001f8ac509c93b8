"""Rounds whose text ends inside the draft: nothing after the end counts as tested or accepted."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import make_llama, spread
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.policies import AdaptiveChain, Policy
from draftsmith.decode.profiling import measure_costs
from draftsmith.heads import DraftModel

PROMPTS = [[5, 9, 33, 2], [8] * 6, [40, 3], [12, 60, 31]]
ENDS = [*range(7, 60, 6)]


class OneOf:
    """A criterion as users write them."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return int(input_ids[0, -1]) in ENDS


@pytest.fixture
def drafter() -> DraftModel:
    """The target with noise: most of its tokens are accepted, and not all."""
    model = make_llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.005 * torch.randn_like(weight)
    return DraftModel(model)


def ends(kind: str, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    if kind == "eos":
        return {"eos_token_id": ENDS}
    if kind == "stop strings":
        return {"stop_strings": tokenizer.convert_ids_to_tokens(ENDS), "tokenizer": tokenizer, "eos_token_id": None}
    return {"stopping_criteria": [OneOf()], "eos_token_id": None}


CASES = [
    ("eos", "chain:draft_length=5"),
    ("eos", "best-first:size=9,depth=3"),
    ("stop strings", "chain:draft_length=5"),
    ("stop strings", "best-first:size=8,depth=4"),
    ("criteria", "confidence:threshold=0.02,draft_length=5"),
]


@pytest.mark.parametrize(("case", "temperature"), spread(CASES, [0.0, 0.5]), ids=str)
def test_rounds_are_those_of_the_longer_text_up_to_the_end(
    case: tuple[str, str],
    temperature: float,
    drafter: DraftModel,
    tiny_target: LlamaForCausalLM,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Alone and in a batch, whose other texts go on."""
    kind, policy = case
    decoder, inside = SpeculativeDecoder(tiny_target, drafter, policy=policy), 0
    settings = {"max_new_tokens": 32, "temperature": temperature}
    options = ends(kind, tiny_tokenizer)
    for seed in range(0, 8, len(PROMPTS)):
        numbers = range(seed, seed + len(PROMPTS))
        whole = decoder.generate_batch(PROMPTS, seeds=list(numbers), eos_token_id=None, **settings)
        batch = decoder.generate_batch(PROMPTS, seeds=list(numbers), **settings, **options)
        alone = [decoder.generate(p, seed=s, **settings, **options) for p, s in zip(PROMPTS, numbers, strict=True)]
        for long, *ended in zip(whole, batch, alone, strict=True):
            for text in ended:
                assert text.tokens == long.tokens[: len(text.tokens)]
                assert [record.committed for record in text.rounds] == _committed(long.rounds, len(text.tokens) - 1)
                for record, uncut in zip(text.rounds, long.rounds, strict=False):
                    assert record.accepted == min(uncut.accepted, record.committed)
                    assert record.overlap == pytest.approx(uncut.overlap[: record.committed], abs=1e-5)
                    assert (record.drafted, record.depth) == (uncut.drafted, uncut.depth), "all of it was verified"
                    inside += uncut.accepted > record.committed
    is_tree = "best-first" in policy and temperature == 0  # of these texts none ends inside a greedy one
    assert inside > 0 or is_tree, "no text ended inside a draft: the test would prove nothing"


def _committed(rounds: list[Any], tokens: int) -> list[int]:
    """Return the tokens of each round of a text that ends after `tokens` of them."""
    counts = []
    for record in rounds:
        if tokens <= 0:
            break
        counts.append(min(record.committed, tokens))
        tokens -= record.committed
    return counts


def test_a_drafter_that_is_right_up_to_the_end_has_an_alpha_of_one(tiny_target: LlamaForCausalLM) -> None:
    """Its drafts after the EOS are wrong, which must not count."""
    eos = SpeculativeDecoder(tiny_target).generate(PROMPTS[0], max_new_tokens=30, eos_token_id=None).tokens[5]
    model = deepcopy(tiny_target)
    with torch.no_grad():
        model.get_input_embeddings().weight[eos] = torch.randn(32)
    decoder = SpeculativeDecoder(tiny_target, DraftModel(model), draft_length=8)
    text = decoder.generate(PROMPTS[0], max_new_tokens=30, eos_token_id=eos)
    assert (text.stopped_by, text.alpha, text.acceptance_at) == ("eos", 1.0, [1.0] * 5)
    assert text.drafted == [False, *[True] * 5]


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
def test_drafts_end_before_the_last_token_of_a_text(count: int, tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), draft_length=5)
    text = decoder.generate(PROMPTS[0], max_new_tokens=count, eos_token_id=None)
    assert all(record.accepted == record.drafted == record.committed - 1 for record in text.rounds)


def test_policies_learn_nothing_from_a_draft_inside_which_the_text_ends(tiny_target: LlamaForCausalLM) -> None:
    costs = measure_costs(tiny_target)
    eos = SpeculativeDecoder(tiny_target).generate(PROMPTS[0], max_new_tokens=3, eos_token_id=None).tokens[1]
    policy = AdaptiveChain(costs)
    decoder = SpeculativeDecoder(tiny_target, DraftModel(make_llama()), policy=policy)
    found = []
    for end in (eos, None):
        decoder.calibrate([PROMPTS[0]], max_new_tokens=30, eos_token_id=end)
        found.append(_learned(decoder.policy))
    assert found[0] == _learned(policy) != found[1]


def _learned(policy: Policy | None) -> list[Any]:
    assert isinstance(policy, AdaptiveChain)
    return [policy.experience[True].speed.tokens_per_second, policy.experience[True].accepted.mean]
