"""Llama 4, whose layers without rotation scale queries by position: every pass at its true positions, or none."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import graphs
from draftsmith.decode.passes.runner import ModelRunner
from draftsmith.errors import ConfigError
from draftsmith.heads import DraftModel
from draftsmith.heads.hidden_states import final_states

VOCAB, FLOOR, NEW_TOKENS = 24, 8, 24
PROMPTS = [[3, 9, 4, 1, 5] * 4, [7, 2, 11, 6], [5, 3, 8, 13, 21, 2, 9, 4, 12, 17, 6]]
"""Of 20, 4 and 11 tokens: the scale changes in the prompt, in the text, and in drafts."""


def make(seed: int = 0, **options: object) -> Llama4ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    own = {"no_rope_layers": [1, 0], "floor_scale": FLOOR, "attn_scale": 1.0, "attention_chunk_size": 7}
    given: dict[str, Any] = {**own, **options}
    config = Llama4TextConfig(
        vocab_size=VOCAB, max_position_embeddings=256, **sizes, **heads, **experts, **ids, **given
    )
    model = Llama4ForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn_like(weight) * 0.4)
    return model


@pytest.fixture(scope="module")
def target() -> Llama4ForCausalLM:
    return make()


@pytest.fixture(scope="module")
def expected(target: Llama4ForCausalLM) -> list[list[int]]:
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        texts.append(text[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("policy", [None, "chain:draft_length=3", "best-first:size=6,depth=2"])
def test_texts_of_different_lengths_are_those_of_generate(
    target: Llama4ForCausalLM, expected: list[list[int]], policy: str | None
) -> None:
    drafter = None if policy is None else DraftModel.from_target(target, init="target_layers").double().eval()
    decoder = SpeculativeDecoder(target, drafter, policy=policy)
    together = decoder.generate_batch(PROMPTS, max_new_tokens=NEW_TOKENS)
    assert [out.tokens for out in together] == expected
    assert [decoder.generate(prompt, max_new_tokens=NEW_TOKENS).tokens for prompt in PROMPTS] == expected


def test_compiled_passes_read_the_same_texts() -> None:
    """In float32, where masks for rows of padding are finite."""
    model = make().float()
    drafter = DraftModel.from_target(model, init="target_layers").eval()
    with patch.dict(graphs.OPTIONS, {"cpu": {"backend": "eager"}}):
        texts = [
            [out.tokens for out in SpeculativeDecoder(model, drafter, draft_length=3, compile=on).generate_batch(
                PROMPTS, max_new_tokens=NEW_TOKENS)]
            for on in (False, True)
        ]  # fmt: skip
    assert texts[0] == texts[1]


@torch.inference_mode()
def test_logits_of_a_tree_are_those_of_its_paths(target: Llama4ForCausalLM) -> None:
    """A sibling's child lies one slot further than its position, on the other side of a step of the scale."""
    context, tokens, parents = [*range(1, FLOOR - 1)], [5, 6, 7, 8], (-1, 0, -1, 2)
    runner = ModelRunner(target, 1)
    runner.append([context[:-1]])
    read_NV = runner.tree(torch.tensor([[context[-1], *tokens]]), [parents])[0]
    for node, path in enumerate(([5], [5, 6], [7], [7, 8]), 1):
        plain_V = target(torch.tensor([[*context, *path]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(read_NV[node], plain_V, rtol=1e-6, atol=1e-6)


def test_the_model_is_left_as_it_was(target: Llama4ForCausalLM) -> None:
    layers = [layer.self_attn for layer in target.model.layers]
    assert all(layer.attn_temperature_tuning for layer in layers)
    assert not any(layer.q_proj._forward_hooks for layer in layers)


def test_packed_rows_without_sdpa_are_refused() -> None:
    model = make()
    model.set_attn_implementation("eager")
    ids_BT = torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"data\.pack=True with model_type='llama4_text', which scales queries by"):
        final_states(model, ids_BT, ids_BT, documents_BT=torch.tensor([[0, 0, 0, 1, 1, 1]]))
