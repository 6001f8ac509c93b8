"""Targets by name; adapters, with the tokenizer and the chat template that were saved with them."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.load_target import load_ends, load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import eos_tokens

TEMPLATE = "{% for m in messages %}{{ m.role[0]|upper }}{{ m.content }}E{% endfor %}"


@pytest.fixture
def adapter(tiny_target_folder: Path, tmp_path: Path) -> Path:
    """A LoRA as peft saves it, without a tokenizer."""
    base = LlamaForCausalLM.from_pretrained(tiny_target_folder)
    lora = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapters_tokenizer_is_read(
    adapter: Path, tiny_target_folder: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """TRL and axolotl save it with the chat template and the EOS of the fine-tuning."""
    base = load_target(str(tiny_target_folder))
    alone = load_target(str(adapter))
    assert alone.tokenizer.chat_template is None
    ends = eos_tokens(base.model.config, base.model.generation_config)
    assert load_ends(str(adapter)) == eos_tokens(alone.model.config, alone.model.generation_config) == ends
    tiny_tokenizer.chat_template, tiny_tokenizer.eos_token = TEMPLATE, "E"
    tiny_tokenizer.save_pretrained(adapter)
    loaded = load_target(str(adapter))
    tokenizer, config = load_tokenizer(str(adapter))
    assert loaded.tokenizer.chat_template == tokenizer.chat_template == TEMPLATE
    assert config.vocab_size == base.model.config.vocab_size
    assert tokenizer.eos_token == "E"
    both = ends | {tokenizer.eos_token_id}
    assert load_ends(str(adapter)) == eos_tokens(loaded.model.config, loaded.model.generation_config) == both


def test_an_adapters_tokenizer_with_new_tokens_is_refused(
    adapter: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer.add_tokens(["<new>"])
    tiny_tokenizer.save_pretrained(adapter)
    for load in (load_target, load_tokenizer, load_ends):
        with pytest.raises(ConfigError, match=r"its tokenizer has 65 tokens; expected at most 64"):
            load(str(adapter))


def test_an_adapters_tokenizer_that_cannot_be_read_is_refused(adapter: Path) -> None:
    (adapter / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter: its tokenizer cannot be read"):
        load_tokenizer(str(adapter))


def test_missing_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_target(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"target\.dtype='int3'; expected one of float32"):
        load_target(str(tmp_path), dtype="int3")
    with pytest.raises(ConfigError, match="expected 'embedded', a local folder, a GGUF file or a Hub id"):
        load_target(str(tmp_path))


def test_a_target_has_the_given_attention_implementation(tiny_target_folder: Path) -> None:
    name = str(tiny_target_folder)
    assert load_target(name).model.config._attn_implementation == "sdpa"
    assert load_target(name, attn_implementation="eager").model.config._attn_implementation == "eager"
    for wrong, message in {
        "flex_attention": r"'flex_attention'; expected sdpa, eager, flash_attention_2",
        "user/flash-attn": r"'user/flash-attn'; expected sdpa, eager, flash_attention_2",
        "flash_attention_2": r"flash_attention_2 with dtype=float32; expected bfloat16 or float16",
    }.items():
        with pytest.raises(ConfigError, match=rf"target\.attn_implementation=.?{message}"):
            load_target(name, attn_implementation=wrong)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"attn_implementation=flash_attention_2; expected one that target="):
            load_target(name, attn_implementation="flash_attention_2", dtype="bfloat16")
