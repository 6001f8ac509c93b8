"""Every supported architecture against transformers' `generate`: chains, trees and ragged batches give its own text."""

from copy import deepcopy
from functools import cache

import pytest
import recurrent_models
import torch
from conftest import mostly_slow, spread
from drawn_tree import ChosenTree, widths_shape
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.decode.policies import BestFirst, Chain
from draftsmith.decode.sequence import DecodeSequence
from draftsmith.decode.target import TransformersTarget
from draftsmith.heads.base import Level
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.draft_tree import Draft

VOCAB = 61
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.25}
IDS = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
GQA = {"num_key_value_heads": 2, "head_dim": 8}
SLIDES = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SWITCH = 17
"""Positions with the frequencies of short texts; see also tests/unit/decode/test_rotary_switch.py."""
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": SWITCH, **FACTORS}

DECODER_ONLY = {
    "llama": lambda: LlamaConfig(**SIZES, **IDS, **GQA),
    "qwen2": lambda: Qwen2Config(**SIZES, **IDS, num_key_value_heads=2),
    "qwen2-sliding": lambda: Qwen2Config(**SIZES, **IDS, num_key_value_heads=2, use_sliding_window=True, **SLIDES),
    "qwen3": lambda: Qwen3Config(**SIZES, **IDS, **GQA),
    "mistral": lambda: MistralConfig(**SIZES, **IDS, **GQA, sliding_window=None),
    "mistral-sliding": lambda: MistralConfig(**SIZES, **IDS, **GQA, sliding_window=6),
    "gemma": lambda: GemmaConfig(**SIZES, **IDS, **GQA),
    "gemma2-sliding": lambda: Gemma2Config(**SIZES, **IDS, **GQA, **SLIDES, query_pre_attn_scalar=8),
    "gemma3-sliding": lambda: Gemma3TextConfig(**SIZES, **IDS, **GQA, **SLIDES, query_pre_attn_scalar=8),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.25, **IDS
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, **IDS, rotary_pct=0.25),
    "phi-partial-rotary": lambda: PhiConfig(**SIZES, **IDS, partial_rotary_factor=0.5),
    "phi3-longrope": lambda: Phi3Config(
        **SIZES, **IDS, num_key_value_heads=2, original_max_position_embeddings=SWITCH, rope_parameters=LONGROPE
    ),
    "phi3-sliding": lambda: Phi3Config(**SIZES, **IDS, num_key_value_heads=2, sliding_window=6),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, init_std=0.25, **IDS,
    ),
    "llama4-scaled-queries": lambda: Llama4TextConfig(
        **SIZES, **IDS, **GQA, intermediate_size_mlp=48, num_local_experts=2, num_experts_per_tok=1,
        no_rope_layers=[1, 0], floor_scale=8, attn_scale=1.0, attention_chunk_size=7,
    ),
    "smollm3-no-rope": lambda: SmolLM3Config(**SIZES, **IDS, num_key_value_heads=2, no_rope_layers=[1, 0]),
}  # fmt: skip
T5_SIZES = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
T5_SIZES |= {"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
T5_SIZES |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
ENCODER_DECODER = {
    "t5": lambda: T5Config(**T5_SIZES),
    "t5-gated-untied": lambda: T5Config(**T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}
POLICIES = {"chain": Chain(4), "tree": ChosenTree(widths_shape((3, 2, 1))), "best-first": BestFirst(size=9, depth=4)}
PROMPTS = [[7, 8, 9], [5, 4, 3, 2, 20, 21, 22, 23, 24, 25], [11], [12, 13, 14, 15, 16]]
NEW_TOKENS = 24


@cache
def build(family: str, seed: int) -> PreTrainedModel:
    """A random model of the family; large weights keep its text from going in circles at once."""
    torch.manual_seed(seed)
    if family in DECODER_ONLY:
        model = AutoModelForCausalLM.from_config(DECODER_ONLY[family]())
    else:
        model = AutoModelForSeq2SeqLM.from_config(ENCODER_DECODER[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases that a fresh model has at 0 or 1 would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = 1
    return model.eval()


def generated(model: PreTrainedModel) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        start = 1 if model.config.is_encoder_decoder else len(prompt)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(out[0, start:].tolist())
    assert len({tuple(text) for text in texts}) > 1, "the texts have to tell prompts apart"
    return texts


@cache
def reference(family: str) -> list[list[int]]:
    return generated(build(family, 0))


def drafter_for(family: str) -> DraftModel:
    """The target itself with some noise: it is right often, so that long paths and their caches are exercised."""
    model, noise = build(family, 0), build(family, 1)
    with torch.no_grad():
        torch.manual_seed(2)
        draft = type(model)(model.config)
        draft.load_state_dict(
            {name: value + 0.05 * noise.state_dict()[name] for name, value in model.state_dict().items()}
        )
    return DraftModel(draft.eval())


@pytest.mark.parametrize(("family", "policy"), spread([*DECODER_ONLY, *ENCODER_DECODER], POLICIES))
def test_greedy_text_is_that_of_generate(family: str, policy: str) -> None:
    expected = reference(family)
    decoder = SpeculativeDecoder(build(family, 0), drafter_for(family), policy=POLICIES[policy])
    alone = [decoder.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == expected
    assert sum(record.accepted for out in alone for record in out.rounds) > 4, "hardly anything was drafted right"
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [out.tokens for out in batch] == expected, "in a batch"


RECURRENT = {**recurrent_models.FAMILIES, **recurrent_models.OTHERS}


@pytest.mark.parametrize("family", mostly_slow(RECURRENT, "jamba", "qwen3_next", "rwkv"))
@pytest.mark.filterwarnings("ignore:model_type=")
def test_greedy_text_of_recurrent_models_is_that_of_generate(family: str) -> None:
    """In float64; drafts are rejected at several depths."""
    model = recurrent_models.build(family)
    expected = generated(model)
    decoder = SpeculativeDecoder(model, recurrent_models.noisy(model), policy=Chain(4))
    alone = [decoder.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [out.tokens for out in alone] == expected
    accepted = {record.accepted for out in alone for record in out.rounds if record.drafted == 4}
    assert len(accepted - {4}) > 1
    batch = decoder.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [out.tokens for out in batch] == expected, "in a batch"


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_a_tree_is_read_as_its_paths_are(family: str) -> None:
    """The logits at every node equal those of a separate forward pass over the path."""
    model, draft = build(family, 0), Draft((3, 4, 5, 3, 9, 8, 2, 6), (-1, -1, 0, 0, 1, 2, 2, 5))
    texts, root = [DecodeSequence([0], 60, source=prompt) for prompt in PROMPTS[:3]], 17
    drafts = [draft, draft, draft.keep([0, 2, 6])]
    rows = [[root, *shown.tokens, *[0] * (len(draft) - len(shown))] for shown in drafts]
    with torch.inference_mode():
        target = TransformersTarget(model)
        target.prefill(texts)
        out = target.verify(torch.tensor(rows), [shown.parents for shown in drafts])
        for text, logits_PV, shown in zip(texts, out, drafts, strict=True):
            for node in range(-1, len(shown)):
                path = torch.tensor([[0, root, *(shown.tokens[step] for step in shown.path(node))]])
                expected_V = model(input_ids=torch.tensor([text.source]), decoder_input_ids=path).logits[0, -1]
                torch.testing.assert_close(logits_PV[node + 1], expected_V, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", DECODER_ONLY)
def test_every_kind_of_pass_equals_plain_forward_passes_in_float64(family: str) -> None:
    """Chains and trees, of one row, of rows that start at the same slot, and of ragged rows, beyond the windows too."""
    model = deepcopy(build(family, 0)).double()
    in_float64 = model.config._attn_implementation == "sdpa" and "llama4" not in family
    tolerance = 1e-10 if in_float64 else 1e-5  # eager computes softmax in float32, and Llama 4 its rotations
    chain, tree = Draft((3, 4, 5, 9), (-1, 0, 1, 2)), Draft((3, 4, 5, 3, 9), (-1, -1, 0, 0, 1))
    for drafts in ([chain], [tree], [chain, chain, chain], [chain, tree, chain]):
        for prompts in ([PROMPTS[1]] * 3, PROMPTS[:3]):
            rows = prompts[: len(drafts)]
            runner = ModelRunner(model, len(rows))
            with torch.inference_mode():
                runner.append(rows)
                runner.append([[17, 18]] * len(rows))
                wide = [torch.tensor([19, *draft.tokens]) for draft in drafts]
                tokens_BQ = torch.nn.utils.rnn.pad_sequence(wide, batch_first=True)
                at_once_BQV = runner.tree(tokens_BQ, [draft.parents for draft in drafts])[:, 1:]
                runner.commit([[0] for _ in rows])
                by_level = read_by_level(runner, drafts)
                for row, (prompt, draft) in enumerate(zip(rows, drafts, strict=True)):
                    for node in range(len(draft)):
                        path = [*prompt, 17, 18, 19, *(draft.tokens[step] for step in draft.path(node))]
                        expected_V = model(input_ids=torch.tensor([path])).logits[0, -1]
                        for logits_V in (at_once_BQV[row, node], by_level[row, node]):
                            torch.testing.assert_close(logits_V, expected_V, atol=tolerance, rtol=tolerance)


def read_by_level(runner: ModelRunner, drafts: list[Draft]) -> dict[tuple[int, int], torch.Tensor]:
    """Return the logits [V] after each (row, node), read level by level as drafters do."""
    logits: dict[tuple[int, int], torch.Tensor] = {}
    above: list[list[int]] = [[-1] for _ in drafts]
    for depth in range(1, max(draft.depth for draft in drafts) + 1):
        nodes = [[node for node in range(len(draft)) if draft.depths[node] == depth] for draft in drafts]
        tokens = [
            torch.tensor([draft.tokens[i] for i in of_row]).long() for draft, of_row in zip(drafts, nodes, strict=True)
        ]
        parents = [
            torch.tensor([before.index(draft.parents[i]) for i in of_row]).long()
            for draft, of_row, before in zip(drafts, nodes, above, strict=True)
        ]
        tokens_Bn, parents_Bn = (
            torch.nn.utils.rnn.pad_sequence([row.long() for row in rows], batch_first=True)
            for rows in (tokens, parents)
        )
        is_chain = all(draft.is_chain for draft in drafts)
        read_BnV = runner.extend(Level(tokens_Bn, None if is_chain else parents_Bn, depth))
        logits |= {
            (row, node): read_BnV[row, column] for row, of_row in enumerate(nodes) for column, node in enumerate(of_row)
        }
        above = nodes
    return logits
