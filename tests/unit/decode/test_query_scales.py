"""Llama 4, whose layers without rotation scale queries by position; its texts: tests/parity/test_families.py."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

from draftsmith import SpeculativeDecoder
from draftsmith.decode.passes import graphs
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


def test_the_model_is_left_as_it_was() -> None:
    target = make()
    SpeculativeDecoder(target).generate(PROMPTS[1], max_new_tokens=2)
    layers = [layer.self_attn for layer in target.model.layers]
    assert all(layer.attn_temperature_tuning for layer in layers)
    assert not any(layer.q_proj._forward_hooks for layer in layers)


def test_packed_rows_without_sdpa_are_refused() -> None:
    model = make()
    model.set_attn_implementation("eager")
    ids_BT = torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"data\.pack=True with model_type='llama4_text', which scales queries by"):
        final_states(model, ids_BT, ids_BT, documents_BT=torch.tensor([[0, 0, 0, 1, 1, 1]]))
