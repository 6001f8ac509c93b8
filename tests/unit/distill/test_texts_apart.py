"""Targets whose rotary frequencies depend on the longest text of a pass: texts are read as each is alone."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from draftsmith import SpeculativeDecoder
from draftsmith.distill.hidden_state_cache import SignalCache
from draftsmith.distill.teacher import Batch, OnlineTeacher
from draftsmith.errors import ConfigError
from draftsmith.heads.flat_rows import padded_reads
from draftsmith.heads.hidden_states import document_numbers, final_states
from draftsmith.heads.model_config import context_limit, decoding_limit, rotary_switch

SWITCH = 24
LENGTHS = (7, 40, SWITCH, 31, SWITCH + 1, 40)
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.5, 3.0, 3.5],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def build(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.25}
    if kind == "dynamic":
        config = LlamaConfig(**SIZES, **ids, max_position_embeddings=SWITCH, rope_parameters=DYNAMIC)
        return LlamaForCausalLM(config).double().eval()
    length = {"max_position_embeddings": 128, "original_max_position_embeddings": SWITCH}
    return Phi3ForCausalLM(Phi3Config(**SIZES, **ids, **length, rope_parameters=LONGROPE)).double().eval()


def texts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(1, 61, (length,)).tolist() for length in lengths]


@torch.no_grad()
def alone(kind: str, text: list[int]) -> tuple[Tensor, Tensor]:
    """Final states and the first layer's output of a new model, which has read no other text."""
    output = build(kind).model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return output.last_hidden_state[0], output.hidden_states[1][0]


def padded(texts: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    ids_BT = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    return ids_BT, (ids_BT > 0).long()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_states_and_features_are_those_of_each_text_alone(kind: str, flat: bool) -> None:
    """Also those of short texts that are padded beyond the switch, and of texts that are read after longer ones."""
    model, texts = build(kind), texts_of(LENGTHS)
    assert rotary_switch(model.config) == SWITCH
    teacher = OnlineTeacher(model, (1,))
    for chosen, width in ((texts, 48), (texts[:1] + texts[2:3], 32), (texts[3:4], 31), (texts[1:2], 40)):
        ids_BT, seen_BT = padded(chosen, width)
        batch = Batch(ids_BT, seen_BT, seen_BT.bool())
        if flat:
            signals = teacher.signals(batch)
        else:
            with padded_reads(model):
                signals = teacher.signals(batch)
        assert signals.features_BTF is not None
        for row, text in enumerate(chosen):
            states_TH, first_TH = alone(kind, text)
            torch.testing.assert_close(signals.hidden_BTH[row, : len(text)], states_TH, atol=1e-6, rtol=1e-6)
            torch.testing.assert_close(signals.features_BTF[row, : len(text)], first_TH, atol=1e-6, rtol=1e-6)
            assert not signals.hidden_BTH[row, len(text) :].any() or len(chosen) == 1


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_packed_and_cached_states_are_those_of_each_text_alone(kind: str) -> None:
    model, texts = build(kind), texts_of(LENGTHS)
    rows = [texts[0] + texts[1] + texts[2], texts[3] + texts[4], texts[5]]
    documents = [[7, 40, SWITCH], [31, SWITCH + 1], [40]]
    expected = [torch.cat([alone(kind, text)[0] for text in own]) for own in (texts[:3], texts[3:5], texts[5:])]
    ids_BT, seen_BT = padded(rows, 75)
    hidden_BTH = final_states(model, ids_BT, seen_BT, documents_BT=document_numbers(documents, 75))
    for row, states_TH in enumerate(expected):
        torch.testing.assert_close(hidden_BTH[row, : len(states_TH)], states_TH, atol=1e-6, rtol=1e-6)
    for data, wanted in (
        (Dataset.from_dict({"input_ids": rows, "documents": documents}), expected),
        (Dataset.from_dict({"input_ids": texts}), [alone(kind, text)[0] for text in texts]),
    ):
        cache = SignalCache(model, data, (), "float32")
        cache.build(cache.missing()[0], OnlineTeacher(model), lambda: None)
        for row, states_TH in enumerate(wanted):
            stored_TW = cache.read([row])[0][0].double()
            torch.testing.assert_close(stored_TW, states_TH, atol=1e-5, rtol=1e-5)


def test_gradients_flow_through_texts_that_are_read_apart() -> None:
    model, texts = build("longrope"), texts_of((7, 40))
    ids_BT, seen_BT = padded(texts, 40)
    (final_states(model, ids_BT, seen_BT) * seen_BT[..., None]).sum().backward()
    together = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    for text in texts:
        model.model(torch.tensor([text]), use_cache=False).last_hidden_state.sum().backward()
    for name, gradient in together.items():
        expected = model.get_parameter(name).grad
        assert expected is not None
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-6)


def test_decoded_texts_end_where_dynamic_frequencies_would_change() -> None:
    """There each draft would change the frequencies of the tokens before it."""
    model = build("dynamic")
    assert (context_limit(model.config), decoding_limit(model.config)) == (4 * SWITCH, SWITCH)
    out = SpeculativeDecoder(model).generate(texts_of((7,))[0], max_new_tokens=40)
    assert (len(out.tokens), out.stopped_by) == (SWITCH - 7, "length")
    with pytest.raises(ConfigError, match=f"expected fewer than the target's context of {SWITCH}"):
        SpeculativeDecoder(model).generate(texts_of((SWITCH,))[0], max_new_tokens=1)
