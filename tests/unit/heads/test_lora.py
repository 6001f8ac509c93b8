"""Adapters: no effect at first or when disabled, and the same outputs when merged."""

from pathlib import Path

import pytest
import torch
from conftest import make_llama
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from draftsmith.distill.cotraining import Adapters, with_adapter
from draftsmith.errors import ConfigError
from draftsmith.heads.lora import add_lora, check_lora, merged_state, without_lora

IDS = torch.arange(3, 20)[None]


def test_adapters_come_and_go() -> None:
    model = make_llama().requires_grad_(False)
    plain = model(IDS).logits
    names = set(model.state_dict())
    add_lora(model, rank=3)
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


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "initializer_range": 0.2}
OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("kind", [MixtralConfig, Qwen3MoeConfig, OlmoeConfig, Qwen2MoeConfig])
def test_fused_experts_have_no_adapters(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Where a shared expert has layers of its own (Qwen2-MoE), peft would read their names as the fused experts'."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(kind(**SIZES, **EXPERTS)).eval()
    check_lora(plain, "drafter", rank=3)
    names, state = set(plain.state_dict()), {name: value.clone() for name, value in plain.state_dict().items()}
    model = AutoModelForCausalLM.from_config(plain.config).eval()
    model.load_state_dict(state)
    adapters = Adapters.on(model, rank=3, modules=None)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapters.parameters} == OF_ATTENTION
    for weight in adapters.parameters.values():
        weight.data = torch.randn_like(weight) * 0.1
    with torch.no_grad():
        adapted, unadapted = model(IDS).logits, plain(IDS).logits
        adapters.save(tmp_path, "plain", {})
        assert torch.allclose(with_adapter(plain, tmp_path)(IDS).logits, adapted, atol=1e-5)
    assert not torch.allclose(unadapted, adapted, atol=1e-2)
    merged = AutoModelForCausalLM.from_config(model.config).eval()
    assert set(merged_state(model)) == names
    merged.load_state_dict(merged_state(model))
    assert torch.allclose(merged(IDS).logits, adapted, atol=1e-5)
    with pytest.raises(ConfigError, match=r"cotrain\.modules=\['gate'\]; expected other layers: \w+ has fused experts"):
        check_lora(merged, "cotrain", rank=2, modules=["gate", "q_proj"])


def test_layers_that_cannot_have_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cotrain\.modules=\['lm_head'\] \(tied embeddings\); expected layers"):
        check_lora(make_llama(tie_word_embeddings=True), "cotrain", rank=2, modules=["lm_head"])
    with pytest.raises(ConfigError, match=r"cotrain\.modules=\['q_porj'\]; expected names of layers"):
        check_lora(make_llama(), "cotrain", rank=2, modules=["q_porj", "k_proj"])
    with pytest.raises(ConfigError, match=r"cotrain\.lora_rank=33; expected at most 32"):
        check_lora(make_llama(), "cotrain", rank=33)
