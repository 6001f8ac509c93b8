"""Adapters: no effect at first or when disabled, and the same outputs when merged."""

import pytest
import torch
from conftest import make_llama
from transformers import LlamaForCausalLM

from draftsmith.errors import ConfigError
from draftsmith.heads.lora import add_lora, check_lora, merged_state, without_lora

IDS = torch.arange(3, 20)[None]


def test_adapters_come_and_go() -> None:
    model = make_llama().requires_grad_(False)
    plain = model(IDS).logits
    names = set(model.state_dict())
    add_lora(model, rank=3, alpha=6)
    assert torch.equal(model(IDS).logits, plain)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert len(trained) == 2 * 7 * 2, "two matrices for each of seven linear layers in two blocks"
    torch.manual_seed(0)
    for weight in trained:
        weight.data = torch.randn_like(weight) * 0.1
    adapted = model(IDS).logits
    assert not torch.allclose(adapted, plain)
    with without_lora(model):
        assert torch.equal(model(IDS).logits, plain)
    assert torch.equal(model(IDS).logits, adapted)
    assert all(weight.requires_grad for weight in trained)
    merged = LlamaForCausalLM(model.config).eval()
    state = merged_state(model)
    assert set(state) == names
    merged.load_state_dict(state)
    assert torch.allclose(merged(IDS).logits, adapted, atol=1e-5)


def test_layers_that_cannot_have_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cotrain\.modules=\['lm_head'\] \(tied embeddings\); expected layers"):
        check_lora(make_llama(tie_word_embeddings=True), "cotrain", rank=2, modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"cotrain\.modules=\['q_porj'\]; expected names of layers"):
        check_lora(make_llama(), "cotrain", rank=2, modules=["q_porj", "k_proj"])
    with pytest.raises(ConfigError, match=r"cotrain\.lora_rank=33; expected at most 32"):
        check_lora(make_llama(), "cotrain", rank=33)
