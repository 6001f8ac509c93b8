"""Drafters without training: their indexes against plain searches, lossless decoding, and their names."""

import random
from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from draftsmith import SpeculativeDecoder, load_drafter, save_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.checkpoint import describe_target
from draftsmith.heads.draft_model import DraftModel, EarlyExit, first_layers
from draftsmith.heads.retrieval import Hybrid, NgramIndex, PromptLookup, Retrieval, SuffixAutomaton, SuffixRetrieval

PROMPTS = [[5, 9, 33, 2, 5, 9, 33, 2, 5, 9], [7, 7, 8], [40]]


def longest_repeated_end(text: list[int]) -> int:
    """Length of the longest suffix that also ends earlier, by trying all."""
    for length in range(len(text) - 1, 0, -1):
        if any(text[end - length : end] == text[-length:] for end in range(length, len(text))):
            return length
    return 0


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_match_is_the_longest_one(alphabet: int) -> None:
    draw = random.Random(alphabet)
    for _ in range(60):
        text = [draw.randrange(alphabet) for _ in range(draw.randrange(1, 40))]
        automaton, read = SuffixAutomaton(), 0
        while read < len(text):
            chunk = text[read : read + draw.randrange(1, 5)]
            automaton.extend(chunk)
            read += len(chunk)
            length, end = automaton.match()
            assert length == longest_repeated_end(text[:read])
            if length:
                assert end < read
                assert text[end - length : end] == text[read - length : read]


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 3, (2, [3, 9, 1])),
        ([1, 2, 3, 9, 1, 2], 9, (2, [3, 9, 1, 2, 3, 9, 1, 2, 3])),
        ([4] * 5, 3, (4, [4, 4, 4])),
        ([1, 2, 6, 1, 2, 7, 1, 2], 1, (2, [7])),  # of several ends the one that was matched last
        ([1, 2, 3], 4, (0, [])),
        ([], 4, (0, [])),
    ],
)
def test_the_continuation_follows_the_match_and_repeats_past_the_end(
    text: list[int], count: int, expected: tuple[int, list[int]]
) -> None:
    assert SuffixAutomaton(text).propose(count) == expected


def test_the_ngram_index_finds_the_most_recent_earlier_occurrence() -> None:
    index = NgramIndex(longest=2)
    index.extend([1, 2, 6, 1, 2, 7, 3, 1, 2])
    assert index.propose(3) == (2, [7, 3, 1])
    index.extend([8])
    assert index.propose(3) == (0, [])
    index.extend([2])
    assert index.propose(2) == (1, [8, 2])


def untrained(target: LlamaForCausalLM) -> dict[str, Drafter]:
    return {
        "prompt lookup": PromptLookup(),
        "suffix": SuffixRetrieval(min_match=1),
        "early exit": EarlyExit(target, layers=1),
        "hybrid": Hybrid(DraftModel(make_llama(1)), SuffixRetrieval(), min_match=2),
        "hybrid of early exit": Hybrid(EarlyExit(target, layers=1), min_match=1),
    }


@pytest.mark.parametrize("name", untrained(make_llama()))
def test_the_text_is_the_targets_own(tiny_target: LlamaForCausalLM, name: str) -> None:
    alone, decoder = SpeculativeDecoder(tiny_target), SpeculativeDecoder(tiny_target, untrained(tiny_target)[name])
    expected = [alone.generate(prompt, max_new_tokens=40, eos_token_id=None).tokens for prompt in PROMPTS]
    outputs = [decoder.generate(prompt, max_new_tokens=40, eos_token_id=None) for prompt in PROMPTS]
    assert [out.tokens for out in outputs] == expected
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=40, eos_token_id=None)
    assert [out.tokens for out in batch] == expected
    assert sum(record.accepted for out in outputs for record in out.rounds) > 0, "no draft token was ever right"


def test_a_hybrid_asks_both(tiny_target: LlamaForCausalLM) -> None:
    """Retrieved drafts may be longer than the policy's chain of two; both kinds have to occur."""
    hybrid = Hybrid(DraftModel(make_llama()), SuffixRetrieval(min_match=1), min_match=3)
    decoder = SpeculativeDecoder(tiny_target, hybrid, draft_length=2)
    out = decoder.generate([19, 19, 19, 19], max_new_tokens=80, eos_token_id=None)
    lengths = {record.drafted for record in out.rounds}
    assert 2 in lengths
    assert max(lengths) > 2
    assert out.tokens == SpeculativeDecoder(tiny_target).generate(
        [19, 19, 19, 19], max_new_tokens=80, eos_token_id=None
    ).tokens  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_llama(num_hidden_layers=3),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=64)).eval(),
        lambda: OPTForCausalLM(
            OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=16, num_hidden_layers=3, num_attention_heads=2,
                      max_position_embeddings=64, word_embed_proj_dim=16)).eval(),
    ],
)  # fmt: skip
def test_early_exit_shares_every_weight(make: object) -> None:
    target = make()
    model = first_layers(target, 2)
    own = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in model.parameters()} <= own
    assert len(list(model.parameters())) < len(list(target.parameters()))
    assert target.config.num_hidden_layers == 3
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        hidden = target(ids, output_hidden_states=True).hidden_states
        got = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(got[1], hidden[1])


def test_named_drafters_are_loaded_with_their_settings(
    tiny_target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lookup = load_drafter("prompt-lookup:max_ngram=2,draft_length=5", tiny_target)
    assert isinstance(lookup, PromptLookup)
    assert (lookup.max_ngram, lookup.max_draft_length) == (2, 5)
    assert load_drafter("early-exit:layers=1", tiny_target).layers == 1
    made_for = describe_target(tiny_target, None, "tiny")
    save_drafter(DraftModel(make_llama(1)), tmp_path / "draft", target=made_for, recipe=None, draft_length=3)
    hybrid = load_drafter("hybrid:drafter=~/draft,min_match=5", tiny_target)
    assert isinstance(hybrid.retrieval, Retrieval)
    assert (hybrid.min_match, hybrid.draft_length_hint, hybrid.drafter.type) == (5, 3, "draft_model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("suffix:min_mach=3", "'min_mach=3'; expected suffix:KEY=VALUE .* did you mean min_match?"),
        ("suffix:min_match=x", "min_match='x'; expected a whole number"),
        ("suffix:draft_length=0", "draft_length=0; expected >= 1"),
        ("early-exit:layers=2", "layers=2; expected 1 to 1, fewer than the target has"),
        ("hybrid", "expected hybrid:drafter=FOLDER"),
    ],
)
def test_names_that_do_not_fit_are_refused(tiny_target: LlamaForCausalLM, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_drafter(name, tiny_target)
