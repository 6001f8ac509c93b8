"""Sizes that a config may state: enough for models of every family, and no more than their files can fill."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from draftsmith import load_drafter
from draftsmith.errors import ConfigError
from draftsmith.heads import untrusted as module
from draftsmith.heads.untrusted import bounded

V = 512
SMALL = {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TIED = {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
T5 = {"vocab_size": V, "d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}
BART = {"vocab_size": V, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
GPT2 = {"vocab_size": V, "n_embd": 32, "n_layer": 1, "n_head": 2}
NEO = {"vocab_size": V, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}
MODELS = {
    "llama": SMALL | {"max_position_embeddings": 131072},
    "mistral": SMALL | {"sliding_window": 8, "num_key_value_heads": 1},
    "gemma3_text": SMALL | {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 8},
    "qwen3": SMALL | {"max_position_embeddings": 131072, "num_key_value_heads": 1},
    "gpt2": GPT2,
    "gpt_neo": NEO,
    "t5": T5,
    "bart": BART,
    "m2m_100": BART,
}


@pytest.mark.parametrize("kind", MODELS)
def test_whole_models_are_within_the_bounds(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision, with tied embeddings that are most of the file; only masks and tables are allowed for."""
    monkeypatch.setattr(module, "ALWAYS", 2**10 if kind not in ("gpt_neo", "m2m_100") else 2**23)
    config = AutoConfig.for_model(kind, **TIED | MODELS[kind])
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    drafter = load_drafter(tmp_path, model)
    assert all(torch.equal(value, drafter.model.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: torch.empty(2**10, 2**15), 2**25),
        (lambda: torch.zeros(size=(2**25,)), 2**25),
        (lambda: torch.full((2**25,), 7), 2**25),
        (lambda: torch.eye(2**13), 2**26),
        (lambda: torch.eye(2**13, m=2**12), 2**25),
        (lambda: torch.arange(2**25), 2**25),
        (lambda: torch.arange(0, 2**26, 2), 2**25),
        (lambda: torch.arange(start=0, end=2**25), 2**25),
    ],
)
def test_every_way_to_ask_for_memory_counts(make: object, numbers: int) -> None:
    with bounded("x", {"held": (numbers // 4,)}):
        make()
    with (
        pytest.raises(ConfigError, match=r"config\.json claims"),
        bounded("x", {"held": ((numbers - 2**24) // 4 - 2,)}),
    ):
        make()
