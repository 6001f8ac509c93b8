"""Targets whose rotary frequencies change at a length (longrope): their texts are read again there."""

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, Phi3Config, Phi3ForCausalLM

from draftsmith import SpeculativeDecoder
from draftsmith.decode.costs import Costs
from draftsmith.decode.sequence import Round
from draftsmith.errors import ConfigError
from draftsmith.heads import DraftModel
from draftsmith.heads.base import Drafter
from draftsmith.heads.model_config import rotary_switch
from draftsmith.heads.retrieval import SuffixRetrieval

SWITCH, VOCAB, NEW_TOKENS = 24, 11, 30
BEFORE, AFTER = [5, 6, 7, 8, 5, 6, 7], [3, 2, 9, 5] * 7
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH, **FACTORS}


def model_of(context: int = 128, seed: int = 0) -> Phi3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": context, "initializer_range": 0.25}
    rope = {"original_max_position_embeddings": SWITCH, "rope_parameters": ROPE}
    config = Phi3Config(**sizes, **rope, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return Phi3ForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def target() -> Phi3ForCausalLM:
    return model_of()


class Scores(LogitsProcessor):
    """Keeps each text that it is asked for, and its scores."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen |= {tuple(ids.tolist()): row.clone() for ids, row in zip(input_ids, scores, strict=True)}
        return scores


def greedy_text(model: Phi3ForCausalLM, prompt: list[int]) -> list[int]:
    """The text of forward passes without a cache."""
    ids = list(prompt)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_switch_is_that_of_the_config_where_the_context_reaches_it(target: Phi3ForCausalLM) -> None:
    assert rotary_switch(target.config) == SWITCH
    assert rotary_switch(model_of(SWITCH).config) is None
    both = Phi3Config(rope_parameters=None)
    both.rope_parameters = {"full_attention": {"rope_type": "default"}, "sliding_attention": ROPE}
    assert rotary_switch(both) == SWITCH


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_on_both_sides_are_those_of_passes_without_a_cache(target: Phi3ForCausalLM, temperature: float) -> None:
    """Passes are padded to 8 tokens, so that padding alone would reach beyond the switch."""
    scores, costs = Scores(), Costs({**dict.fromkeys(range(1, 8), 2.0), 8: 1.0}, {1: 1.0})
    decoder = SpeculativeDecoder(target, SuffixRetrieval(), costs=costs)
    settings = {"max_new_tokens": NEW_TOKENS, "temperature": temperature, "logits_processor": [scores]}
    outs = decoder.generate_batch([BEFORE, AFTER, BEFORE[:3]], seeds=[1, 2, 3], **settings)
    assert sum(record.drafted for out in outs for record in out.rounds) > 20, "hardly any drafts were verified"
    assert min(map(len, scores.seen)) <= 3
    assert max(map(len, scores.seen)) > SWITCH + 8
    for ids, row_V in scores.seen.items():
        expected_V = target(torch.tensor([ids]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row_V.double(), expected_V, atol=1e-5, rtol=1e-5)


def test_short_texts_that_share_passes_do_not_reach_the_switch(target: Phi3ForCausalLM) -> None:
    """A text at its last tokens is padded to the draft of another one, which would reach beyond the switch."""
    prompts, padded = [(BEFORE * 3)[:17], BEFORE[:3]], 0
    decoder = SpeculativeDecoder(target, DraftModel(model_of(seed=1)), draft_length=4)
    settings = {"max_new_tokens": SWITCH + 1 - len(prompts[0]), "temperature": 1.0}
    for seed in range(12):
        together = decoder.generate_batch(prompts, seeds=[seed, seed + 50], **settings)
        alone = [decoder.generate(prompts[row], seed=seed + 50 * row, **settings) for row in (0, 1)]
        assert [out.tokens for out in together] == [out.tokens for out in alone]
        padded += len(together[0].rounds) <= len(together[1].rounds)
    assert padded > 4, "the longer text was hardly ever the one with less room"


@pytest.mark.parametrize("drafter", [None, DraftModel(model_of())])
@pytest.mark.parametrize("prompt", [BEFORE, BEFORE * 4, (BEFORE * 4)[: SWITCH - 1], (BEFORE * 4)[:SWITCH]])
def test_a_text_equals_that_without_a_cache(
    target: Phi3ForCausalLM, drafter: Drafter | None, prompt: list[int]
) -> None:
    out = SpeculativeDecoder(target, drafter).generate(prompt, max_new_tokens=NEW_TOKENS)
    assert out.tokens == greedy_text(target, prompt)
    assert sum(record.committed for record in out.rounds) == NEW_TOKENS - 1


def test_the_second_reading_is_a_round_without_a_draft(target: Phi3ForCausalLM) -> None:
    got: list[tuple[int, Round | None]] = []
    decoder = SpeculativeDecoder(target, DraftModel(model_of()), draft_length=3)
    out = decoder.generate(
        BEFORE, max_new_tokens=NEW_TOKENS, on_tokens=lambda tokens, record: got.append((len(tokens), record))
    )
    assert [record for _, record in got] == [None, *out.rounds]
    assert [count for count, _ in got] == [1, *(record.committed for record in out.rounds)]
    lengths = [len(BEFORE) + sum(count for count, _ in got[: place + 1]) for place in range(len(got))]
    again = got[lengths.index(SWITCH + 1) + 1][1]
    assert again is not None
    assert (again.drafted, again.committed) == (0, 1)
    assert again.seconds > 0


def test_criteria_read_the_whole_text(target: Phi3ForCausalLM) -> None:
    texts: list[list[int]] = []
    out = SpeculativeDecoder(target, DraftModel(model_of()), draft_length=3).generate(
        BEFORE, max_new_tokens=NEW_TOKENS, stopping_criteria=[lambda ids, _: bool(texts.append(ids[0].tolist()))]
    )
    whole = [*BEFORE, *out.tokens]
    assert texts == [whole[: len(BEFORE) + count] for count in range(1, NEW_TOKENS + 1)]


def test_an_eos_before_the_switch_ends_the_text(target: Phi3ForCausalLM) -> None:
    first = greedy_text(target, BEFORE)[0]
    out = SpeculativeDecoder(target).generate(BEFORE, max_new_tokens=NEW_TOKENS, eos_token_id=first)
    assert (out.tokens, out.stopped_by) == ([first], "eos")


def test_compiled_passes_are_refused(target: Phi3ForCausalLM) -> None:
    with pytest.raises(ConfigError, match=f"rotary frequencies that change at {SWITCH}; expected compile"):
        SpeculativeDecoder(target, compile=True)
