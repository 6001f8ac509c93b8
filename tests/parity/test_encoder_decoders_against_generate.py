"""Options of `generate` for encoder-decoder models, and several texts per prompt, compared with transformers."""

from collections.abc import Callable
from inspect import signature

import pytest
import torch
from conftest import VOCAB, make_llama
from targets.tiny import build, model_classes, tiny_config
from torch import nn
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith import as_custom_generate
from draftsmith.decode.cache.rollback import cache_name
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.errors import ConfigError
from draftsmith.heads import Drafter, DraftModel
from draftsmith.heads.retrieval import SuffixRetrieval

START, EOS, NEW_TOKENS = 3, 1, 16
IDS = torch.tensor([[5, 6, 7, 8, 9], [4, 3, 2, 0, 0], [11, 12, 13, 14, 0]])
MASK = (IDS > 0).long()
OPTIONS = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


def make_t5(noise: float = 0.0) -> T5ForConditionalGeneration:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "initializer_factor": 1.0}
    torch.manual_seed(0)
    config = T5Config(vocab_size=VOCAB, decoder_start_token_id=START, eos_token_id=EOS, pad_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model


def draft_model() -> DraftModel:
    return DraftModel(make_t5(0.02))


@pytest.fixture
def target() -> T5ForConditionalGeneration:
    return make_t5()


@pytest.fixture(
    params=[lambda: None, lambda: SuffixRetrieval(min_match=1), draft_model], ids=["none", "suffix", "model"]
)
def drafter(request: pytest.FixtureRequest) -> Drafter | None:
    return request.param()


def same(target: nn.Module, drafter: Drafter | None, *inputs: torch.Tensor, **options: object) -> None:
    outputs: list = []
    own = as_custom_generate(drafter, on_output=outputs.extend)
    expected = target.generate(*inputs, **OPTIONS, **options)
    assert target.generate(*inputs, custom_generate=own, **OPTIONS, **options).tolist() == expected.tolist()
    assert len({tuple(row) for row in expected.tolist()}) > 1
    if isinstance(drafter, DraftModel):
        assert sum(record.accepted for output in outputs for record in output.rounds) > 0


OF_SOURCE = {"encoder_no_repeat_ngram_size": 1}


@pytest.mark.parametrize("start", [[], [START]], ids=["without start token", "with start token"])
def test_a_prefix_of_the_decoder_is_continued(
    target: T5ForConditionalGeneration, drafter: Drafter | None, start: list[int]
) -> None:
    prefix = torch.tensor([[*start, 9, 10], [*start, 20, 21], [*start, 30, 31]])
    for more in ({}, {"repetition_penalty": 1.4}, {"decoder_attention_mask": torch.ones_like(prefix)}, OF_SOURCE):
        same(target, drafter, IDS, attention_mask=MASK, decoder_input_ids=prefix, **more)
    mixed = torch.tensor([[START, 9], [20, 21], [30, 31]])
    same(target, drafter, IDS, decoder_input_ids=mixed)  # transformers adds the token where no row has it


def test_encoder_outputs_replace_the_tokens(target: T5ForConditionalGeneration) -> None:
    for drafter in (None, SuffixRetrieval(min_match=1)):
        # The encoder has read something else than these tokens: its outputs win, with and without input_ids.
        for ids in ((), (IDS,)):
            encoded = target.get_encoder()(input_ids=IDS + MASK, attention_mask=MASK)
            same(target, drafter, *ids, attention_mask=MASK, encoder_outputs=encoded)
    encoded = target.get_encoder()(input_ids=IDS)
    same(target, None, encoder_outputs=encoded)
    same(target, None, inputs_embeds=target.get_input_embeddings()(IDS), attention_mask=MASK)
    own = as_custom_generate(draft_model())
    with pytest.raises(ConfigError, match=r"input_ids=None; expected the source's tokens: this drafter has an encoder"):
        target.generate(encoder_outputs=encoded, custom_generate=own, **OPTIONS)


def test_sources_are_encoded_without_padding() -> None:
    """In float64, transformers' states of T5Gemma are NaN where padding is longer than the encoder's window."""
    kind = model_classes()["T5GemmaForConditionalGeneration"]
    model = build(kind, tiny_config(kind), seed=943)
    sources = [[5, 6, 7], [7] * 12, [9, 8, 7]]
    assert model.config.encoder.sliding_window < 9
    texts = SpeculativeDecoder(model).generate_batch(sources, max_new_tokens=6, eos_token_id=None)
    for source, text in zip(sources, texts, strict=True):
        whole = model.generate(torch.tensor([source]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert text.tokens == whole[0, 1:].tolist()


def test_padding_in_the_prefix_is_refused(target: T5ForConditionalGeneration) -> None:
    prefix = {"decoder_input_ids": IDS[:, :3], "decoder_attention_mask": torch.tensor([[1, 0, 1]] * 3)}
    own = as_custom_generate(None)
    with pytest.raises(ConfigError, match=r"decoder_attention_mask=...\) masks tokens; expected decoder_input_ids"):
        target.generate(IDS, custom_generate=own, **prefix, **OPTIONS)


@pytest.mark.parametrize("make", [make_t5, make_llama])
def test_several_texts_a_prompt(make: Callable[[], nn.Module]) -> None:
    """Rows in transformers' order; with one outcome per token each text is known."""
    target, draws = make(), {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}
    ids = IDS.flip(1) if isinstance(target, LlamaForCausalLM) else IDS
    mask = (ids > 0).long()
    own = as_custom_generate(SuffixRetrieval(min_match=1))
    expected = target.generate(ids, attention_mask=mask, top_k=1, **draws)
    assert (
        target.generate(ids, attention_mask=mask, top_k=1, custom_generate=own, **draws).tolist() == expected.tolist()
    )
    assert expected.shape[0] == 9
    torch.manual_seed(0)
    several = target.generate(ids, attention_mask=mask, top_k=0, custom_generate=own, **draws).tolist()
    assert len({tuple(row) for row in several}) > 5, "each text has its own draws"
    dictionary = target.generate(
        ids, attention_mask=mask, custom_generate=own, return_dict_in_generate=True, **draws
    ).sequences
    assert dictionary.shape[0] == 9


def test_other_positions_are_refused(tiny_target: LlamaForCausalLM) -> None:
    own, ids = as_custom_generate(None), IDS.flip(1)
    options = {"attention_mask": (ids > 0).long(), "pad_token_id": 0, "custom_generate": own, **OPTIONS}
    tiny_target.generate(ids, **options)
    with pytest.raises(ConfigError, match=r"generate\(position_ids=...\) differs from the mask"):
        tiny_target.generate(ids, position_ids=torch.arange(5).expand(3, 5) + 1, **options)
    with pytest.raises(ConfigError, match=r"generate\(inputs_embeds=...\) is not supported here; expected input_ids"):
        tiny_target.generate(inputs_embeds=tiny_target.get_input_embeddings()(ids), **options)


@pytest.mark.parametrize("name", ["attention", "recurrent"])
def test_a_cache_with_tokens_is_refused(name: str) -> None:
    """An empty one, as `generate` makes it, is ignored, also where no layer counts its tokens."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    model = make_llama() if name == "attention" else MambaForCausalLM(MambaConfig(**sizes)).eval()
    ids = torch.tensor([[5, 9, 33]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None, **OPTIONS}
    held, cache = cache_name(signature(model.forward).parameters), DynamicCache(config=model.config)
    for given in ({}, {held: cache}):
        own = model.generate(ids, custom_generate=as_custom_generate(None), **options, **given)
        assert own.tolist() == model.generate(ids, **options).tolist()
    model(ids, **{held: cache}, use_cache=True)
    with pytest.raises(ConfigError, match=rf"generate\({held}=...\) contains tokens"):
        model.generate(ids, custom_generate=as_custom_generate(None), **options, **{held: cache})


def test_the_decoder_itself_takes_a_prefix(target: T5ForConditionalGeneration, tiny_target: LlamaForCausalLM) -> None:
    decoder = SpeculativeDecoder(target, draft_model())
    prefix = [[START, 9, 10], [START, 8]]
    outputs = decoder.generate_batch([[5, 6, 7], [4, 3]], decoder_input_ids=prefix, max_new_tokens=6)
    for source, begun, output in zip(([5, 6, 7], [4, 3]), prefix, outputs, strict=True):
        ids = torch.tensor([begun])
        whole = target.generate(torch.tensor([source]), decoder_input_ids=ids, max_new_tokens=6, do_sample=False)
        assert output.tokens == whole[0, len(begun) :].tolist()
    with pytest.raises(ConfigError, match="decoder_input_ids=1 rows; expected 2, none of them empty"):
        decoder.generate_batch([[5], [4]], decoder_input_ids=[[START]])
    with pytest.raises(ConfigError, match="decoder_input_ids with a decoder-only target"):
        SpeculativeDecoder(tiny_target).generate_batch([[5]], decoder_input_ids=[[START]])
