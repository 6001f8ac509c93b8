"""The capability of a model, measured before it is used: trees and chains, chains only, or nothing."""

from inspect import signature
from typing import Any

import pytest
import torch
from conftest import make_llama
from recurrent_models import build
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    ReformerConfig,
    ReformerModelWithLMHead,
    RobertaConfig,
    RobertaForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from draftsmith.decode.cache.rollback import cache_name
from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.decode.passes.attention import Attention, passes_of
from draftsmith.decode.passes.capability import Capability, capability_of
from draftsmith.errors import ConfigError
from draftsmith.heads.base import Drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


def make_bloom(seed: int = 0) -> BloomForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    return BloomForCausalLM(BloomConfig(**sizes, initializer_range=0.3, eos_token_id=None)).eval()


def make_bart() -> BartForConditionalGeneration:
    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = BartConfig(vocab_size=64, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.3, **layers)
    return BartForConditionalGeneration(config).eval()


def make_gpt_neo() -> GPTNeoForCausalLM:
    """Its window is wider than the drafts of the comparison, as that of published models is."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64}
    return GPTNeoForCausalLM(
        GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]], window_size=12, initializer_range=0.3)
    ).eval()


def make_falcon(dtype: torch.dtype = torch.float32) -> FalconForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return FalconForCausalLM(FalconConfig(**sizes, alibi=True, initializer_range=0.3)).eval().to(dtype)


def test_a_llama_reads_trees_and_ragged_batches() -> None:
    capability = capability_of(make_llama())
    assert (capability.kind, capability.no_trees, capability.no_ragged) == ("llama", "", "")


def make_xglm() -> XGLMForCausalLM:
    """Its layers require a mask with a row for each text."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "init_std": 0.3}
    ends = {"bos_token_id": 2, "eos_token_id": None, "pad_token_id": 0}
    return XGLMForCausalLM(XGLMConfig(**sizes, **ends, max_position_embeddings=96, scale_embedding=False)).eval()


EQUAL = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


def assert_texts_are_those_of_generate(target: PreTrainedModel, policy: str) -> None:
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    drafter = DraftModel.from_target(target, num_hidden_layers=1, init="target_layers").eval()
    outputs = SpeculativeDecoder(target, drafter, policy=policy).generate_batch(EQUAL, max_new_tokens=12)
    for prompt, output in zip(EQUAL, outputs, strict=True):
        ids = torch.tensor([prompt])
        made: Any = target.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert output.tokens == made[0, 3:].tolist()


@pytest.mark.parametrize(
    "policy", ["chain:draft_length=3", "best-first:size=6,depth=2", "sampled-tree:width=4,depth=2"]
)
def test_equally_long_texts_of_layers_that_require_a_mask_for_each(policy: str) -> None:
    target = make_xglm()
    assert capability_of(target) == Capability("xglm")
    assert_texts_are_those_of_generate(target, policy)


@pytest.mark.parametrize("fails", ["chains", "trees"])
def test_a_model_that_fails_with_equally_long_texts_reads_them_one_by_one(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains of three tokens, and trees of five, have masks of one row."""
    target = make_xglm()
    target.config.description = fails  # measured here, not taken from another test
    of_rows = Attention.of_rows

    def one_row(attention: Attention, mask: Any, rows: int) -> Any:
        is_tree = mask is not None and mask.shape[2] == 5
        return mask if is_tree == (fails == "trees") else of_rows(attention, mask, rows)

    monkeypatch.setattr(Attention, "of_rows", one_row)
    capability = capability_of(target)
    assert capability.no_trees == ""
    assert "Attention mask should be of size" in capability.no_ragged
    assert_texts_are_those_of_generate(target, "best-first:size=6,depth=2")


CACHE = cache_name(signature(LlamaForCausalLM.forward).parameters)


class IndexedLlama(LlamaForCausalLM):
    """Counts positions in the cache, whatever positions it is given."""

    def forward(self, input_ids, position_ids=None, cache=None, **inputs):
        inputs.setdefault(CACHE, cache)
        return super().forward(input_ids, **inputs)


class RestartedLlama(LlamaForCausalLM):
    """Counts positions from 0 in every pass."""

    def forward(self, input_ids, position_ids=None, cache=None, **inputs):
        inputs |= {"position_ids": torch.arange(input_ids.shape[1])[None].expand(input_ids.shape)}
        inputs.setdefault(CACHE, cache)
        return super().forward(input_ids, **inputs)


def test_wrong_positions_show_in_the_logits() -> None:
    """Both take `position_ids`: only a comparison of logits finds them out."""
    like = make_llama(initializer_range=0.3)
    capability = capability_of(IndexedLlama(like.config).eval())
    assert "logits differ from those of a plain pass by" in capability.no_trees
    model = RestartedLlama(like.config).eval()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"'llama' cannot verify drafts: (logits differ|its forward pass over)"):
            capability_of(model)
        assert passes_of(model) == "grouped", "every way is tried again"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (make_bloom(), "takes no position_ids"),
        (make_bart(), "takes no decoder_position_ids"),
        (make_gpt_neo(), "takes its masks and positions from indices in the cache"),
        (make_falcon(), "ALiBi biases follow indices in the cache"),
        (make_falcon(torch.bfloat16), "ALiBi biases follow indices in the cache"),
    ],
    ids=["bloom", "bart", "gpt_neo", "falcon-alibi", "falcon-alibi-bfloat16"],
)
def test_other_targets_read_chains_only(model: PreTrainedModel, reason: str) -> None:
    """In half precision too, where the numbers of ALiBi's biases for a tree differ less than by rounding."""
    assert reason in capability_of(model).no_trees
    kind = model.config.model_type
    with pytest.raises(ConfigError, match=rf"policy=best-first:.* has branches, and .*'{kind}' reads chains only"):
        SpeculativeDecoder(model, DraftModel(model), policy="best-first:size=4,depth=2")
    with pytest.raises(ConfigError, match=r"policy=sampled-tree:.*; expected policy chain, confidence or adaptive"):
        SpeculativeDecoder(model, DraftModel(model), policy="sampled-tree")


def test_chains_of_a_target_without_trees_give_its_text() -> None:
    """Alone, and in a batch, whose texts are decoded one after another."""
    for model in (make_bloom(), make_gpt_neo(), make_falcon()):
        expected = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            text = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0)
            expected.append(text[0, len(prompt) :].tolist())
        decoder = SpeculativeDecoder(model, DraftModel(model), draft_length=3)
        order: list[int] = []
        outputs = decoder.generate_batch(
            PROMPTS, max_new_tokens=20, on_tokens=lambda text, new, _, order=order: order.append(text)
        )
        assert [output.tokens for output in outputs] == expected
        assert order == sorted(order)
        assert sum(record.accepted for output in outputs for record in output.rounds) > 20


class Branching(Drafter):
    """Retrieves drafts with two branches, whatever the target."""

    type = "branching"
    only_retrieves = True

    def retrieve(self, row: int, room: int) -> Draft:
        return Draft((3, 4), (-1, -1))


def test_a_retrieved_draft_with_branches_is_refused() -> None:
    with pytest.raises(ConfigError, match="this draft has branches, and model_type='bloom' reads chains only"):
        SpeculativeDecoder(make_bloom(), Branching()).generate([3, 4], max_new_tokens=8)


def test_a_draft_model_that_reads_chains_only_limits_the_policy() -> None:
    target, drafter = make_llama(), DraftModel(make_bloom())
    with pytest.raises(ConfigError, match="model_type='bloom' reads chains only"):
        SpeculativeDecoder(target, drafter, policy="best-first")
    outputs = SpeculativeDecoder(target, drafter).generate_batch(PROMPTS, max_new_tokens=12)
    alone = SpeculativeDecoder(target).generate_batch(PROMPTS, max_new_tokens=12)
    assert [output.tokens for output in outputs] == [output.tokens for output in alone]


def test_models_that_cannot_continue_a_cache_are_refused() -> None:
    sizes = {"n_words": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2}
    with pytest.raises(ConfigError, match=r"model_type='xlm' cannot verify drafts: .* \(its output has no 'cache'\)"):
        SpeculativeDecoder(XLMWithLMHeadModel(XLMConfig(**sizes)).eval())
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ConfigError, match="model_type='openai-gpt' takes no cache; expected a model that reads with"):
        SpeculativeDecoder(model)


def test_a_model_whose_generate_reads_other_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("rwkv")
    model.config.description = "another `generate`"  # measured here, not taken from another test
    monkeypatch.setattr(
        type(model),
        "prepare_inputs_for_generation",
        lambda self, input_ids, attention_mask=None, **_: {"input_ids": input_ids.flip(1)},
    )
    with pytest.raises(ConfigError, match="cannot verify drafts: in its `generate`, logits differ from those of a"):
        SpeculativeDecoder(model)


@pytest.mark.parametrize(("encoder", "decoder"), [(1, 2), (3, 1)])
def test_encoders_and_decoders_of_other_depths_and_their_draft_models(encoder: int, decoder: int) -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    ids = {"bos_token_id": 2, "decoder_start_token_id": 2, "eos_token_id": None, "forced_eos_token_id": None}
    config = BartConfig(vocab_size=64, d_model=16, init_std=0.25, **heads, **layers, **ids, pad_token_id=0)
    target, prompt = BartForConditionalGeneration(config).eval(), torch.tensor([[5, 9, 33]])
    drafter = DraftModel.from_target(target).eval()
    assert drafter.model.config.decoder_layers == drafter.model.config.encoder_layers == 1
    text = target.generate(prompt, max_new_tokens=8, do_sample=False, num_beams=1)[0, 1:].tolist()  # pyright: ignore
    assert SpeculativeDecoder(target, drafter).generate(prompt[0].tolist(), max_new_tokens=8).tokens == text


class TakesPositionsFromTokens(RobertaForCausalLM):
    """As Kosmos-2.5: positions count from the id of padding, and `generate` passes none."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs.pop("position_ids", None)
        return inputs


def test_a_model_whose_generate_counts_positions_otherwise_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = RobertaConfig(vocab_size=64, is_decoder=True, initializer_range=0.25, **sizes)
    assert not capability_of(RobertaForCausalLM(config).eval()).no_trees, "`generate` passes indices to RoBERTa"
    with pytest.raises(ConfigError, match="'roberta' cannot verify drafts: in its `generate`, logits differ from"):
        SpeculativeDecoder(TakesPositionsFromTokens(config).eval())


def test_random_attention_is_refused_by_name() -> None:
    """The comparison reads texts that are too short to notice."""
    sizes = {"hidden_size": 32, "axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 16), "attn_layers": ["lsh"]}
    model = ReformerModelWithLMHead(ReformerConfig(vocab_size=64, is_decoder=True, **sizes)).eval()
    with pytest.raises(ConfigError, match=r"model_type='reformer' cannot verify drafts: .* draws hash buckets at"):
        SpeculativeDecoder(model)


@pytest.mark.parametrize("limit", [6, 8])
def test_a_short_context_is_measured_within_it(limit: int) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": limit}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3)).eval()
    capability = capability_of(model)
    assert (capability.no_trees, capability.no_ragged) == ("", "")
    plain = SpeculativeDecoder(model).generate([3, 4], eos_token_id=None).tokens
    assert SpeculativeDecoder(model, DraftModel(model)).generate([3, 4], eos_token_id=None).tokens == plain
    assert len(plain) == limit - 2


def test_a_context_shorter_than_the_comparison_is_named() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=5)).eval()
    with pytest.raises(ConfigError, match="model_type='gpt2' reads at most 5 tokens; expected a context of at least 6"):
        SpeculativeDecoder(model)


def test_logits_that_are_not_numbers_are_refused() -> None:
    model = make_llama()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ConfigError, match="returns NaN logits in float32"):
        SpeculativeDecoder(model)
