"""The default of `generate`, the demo and `as_custom_generate`, and the costs that it plans with."""

from pathlib import Path

import pytest
from conftest import make_llama, noisy_llama
from transformers import LlamaForCausalLM

from draftsmith import SpeculativeDecoder
from draftsmith.decode import fastest
from draftsmith.decode.costs import Costs
from draftsmith.decode.fastest import fastest_decoder, stored_costs
from draftsmith.decode.policies import AdaptiveChain
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.retrieval import Hybrid, PromptLookup

PLANNED = Costs({1: 1.0, 4: 1.2, 16: 2.0}, {1: 0.1})
LINEAR = Costs({1: 1.0, 2: 2.0, 16: 16.0}, {1: 0.1})
"""Every token that is verified costs as much as a pass: no draft pays."""


def test_the_fastest_decoder_adapts_a_hybrid(tiny_target: LlamaForCausalLM) -> None:
    drafter = DraftModel(noisy_llama())
    prompt, settings = [5, 6, 7, 8, 5, 6, 7, 8] * 3, {"max_new_tokens": 60, "eos_token_id": None}
    decoder = fastest_decoder(tiny_target, drafter, costs=PLANNED)
    out = decoder.generate(prompt, **settings)
    assert str(decoder.policy) == "adaptive:draft_length=16"
    assert isinstance(decoder.drafter, Hybrid)
    assert out.tokens == SpeculativeDecoder(tiny_target).generate(prompt, **settings).tokens
    assert len({record.drafted for record in out.rounds}) > 2
    again = fastest_decoder(tiny_target, drafter, costs=PLANNED)
    texts = [one.generate(prompt, seed=4, temperature=1.0, **settings).tokens for one in (again, decoder)]
    assert texts[0] == texts[1], "a seed makes a text reproducible"


def test_what_the_fastest_decoder_drafts_with(tiny_target: LlamaForCausalLM) -> None:
    drafter, own = DraftModel(noisy_llama()), Hybrid(DraftModel(noisy_llama()))
    assert fastest_decoder(tiny_target, drafter, rule="block", costs=PLANNED).drafter is drafter
    assert fastest_decoder(tiny_target, own, costs=PLANNED).drafter is own
    assert fastest_decoder(tiny_target, None).drafter is None
    assert fastest_decoder(tiny_target, PromptLookup()).policy is None
    pays = {texts: fastest_decoder(tiny_target, drafter, batch_size=texts, costs=LINEAR).drafter for texts in (1, 8)}
    assert pays[1] is not None, "it is tried from time to time"
    assert pays[8] is None


def test_copies_in_a_batch_cost_the_padding_of_all_texts() -> None:
    dear = Costs({1: 1.0, 8: 1.1}, {1: 1.0})
    assert not AdaptiveChain(dear).may_pay(retrieved=False), "a step costs a pass"
    assert AdaptiveChain(dear).may_pay(retrieved=True), "copies cost none"
    assert not AdaptiveChain(dear, batch_size=64).may_pay(retrieved=True), "all are padded to the one with a match"


def test_costs_are_measured_once_for_models_of_the_same_shapes(
    tiny_target: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(fastest, "_KNOWN", {})
    first = stored_costs(tiny_target, DraftModel(make_llama(1)))
    assert set(first.verify[1]) == {1, 2, 4, 8}
    assert all(seconds > 0 for seconds in (*first.verify[1].values(), first.draft[1][1]))
    (file,) = (tmp_path / "costs").iterdir()
    for known in (fastest._KNOWN, {}):  # later in this process, and in another one
        monkeypatch.setattr(fastest, "_KNOWN", known)
        assert stored_costs(tiny_target, Hybrid(DraftModel(make_llama(2)))) == first
    monkeypatch.setattr(fastest, "_KNOWN", {})
    file.write_text("{")
    assert stored_costs(tiny_target, DraftModel(make_llama(1))) == Costs.load(file), "measured again"
    heads = stored_costs(tiny_target, Medusa.from_target(tiny_target, num_heads=2))
    assert set(heads.verify[1]) == {1, 2, 3}
    batches = {
        texts: stored_costs(tiny_target, DraftModel(make_llama(1)), batch_size=texts) for texts in (3, 4, 5, 16, 400)
    }
    assert batches[3] == batches[4]
    assert batches[16] == batches[400] != batches[5]
    assert len([*(tmp_path / "costs").iterdir()]) == 5
