"""Targets by name; adapters, with the tokenizer and the chat template that were saved with them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_llama
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.distill.load_target import load_ends, load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.heads.model_config import eos_tokens
from draftsmith.storage import write_text

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


Weights = dict[str, Tensor]


def rewrite(file: Path, change: Callable[[Weights], Weights]) -> None:
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def with_a_short_matrix(weights: Weights) -> Weights:
    name = "model.layers.1.mlp.up_proj.weight"
    return weights | {name: weights[name][:-1].contiguous()}


TARGETS: dict[str, Callable[[Weights], Weights]] = {
    r"holds no tensor model\.layers\.0\.mlp\.down_proj\.weight, .* and 3 more; expected all of its weights": (
        lambda weights: {name: weight for name, weight in weights.items() if ".mlp." not in name}
    ),
    r"holds no tensor lm_head\.weight, .* and holds module\.lm_head\.weight, .*, which LlamaForC": (
        lambda weights: {f"module.{name}": weight for name, weight in weights.items()}
    ),
    r"1\.mlp\.up_proj\.weight has shape \[\d+, 32\]; expected \[\d+, 32\] by its config": with_a_short_matrix,
}


@pytest.mark.parametrize("message", TARGETS)
def test_a_target_without_all_of_its_weights_is_refused(
    message: str, adapter: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    """transformers would fill in random ones. The same holds for the base model of an adapter."""
    folder = copied(tiny_target_folder, tmp_path / "target")
    rewrite_config(adapter, base_model_name_or_path=str(folder))
    assert load_target(str(adapter)).name == str(adapter)
    rewrite(folder / "model.safetensors", TARGETS[message])
    for name in (folder, adapter):
        with pytest.raises(ConfigError, match=rf"target={folder}.*{message}"):
            load_target(str(name))


def test_tied_weights_are_not_missing_and_tensors_of_no_layer_are_named(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = make_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path), tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    assert "lm_head.weight" not in load_file(file)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(load_target(str(tmp_path), device="cpu").model(ids).logits, model(ids).logits)
    assert not [warning for warning in recwarn if "not read" in str(warning.message)]
    rewrite(file, lambda weights: weights | {"vision.weight": torch.ones(2)})
    with pytest.warns(UserWarning, match="/.* holds vision.weight, which LlamaForCausalLM does not have: not read"):
        load_target(str(tmp_path))


def test_pickled_weights_are_refused_with_the_remedy(tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = copied(tiny_target_folder, tmp_path / "target")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"pickled weights \(\.bin, \.pt\) are not read\. Load them once with transf"):
        load_target(str(folder))


def weights(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    return lambda adapter: rewrite(adapter / "adapter_model.safetensors", change)


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return weights(lambda weights: {name.replace(old, new): weight for name, weight in weights.items()})


def config(**values: Any) -> Callable[[Path], None]:
    return lambda adapter: rewrite_config(adapter, **values)


NO_TENSOR = r"holds no tensor base_model\.model\.model\.layers\.{}\.self_attn\.q_proj\.lora_A\.weight, "
ADAPTERS: dict[str, Callable[[Path], None]] = {
    "adapter: its tokenizer cannot be read": lambda adapter: write_text(adapter / "tokenizer_config.json", "{"),
    NO_TENSOR.format(0): renamed("model.layers", "transformer.h"),
    NO_TENSOR.format(1): weights(lambda weights: {n: weight for n, weight in weights.items() if ".layers.1." not in n}),
    r"for no layer of the base model, base_model\.model\.model\.layers\.2\..*; expected an ad": weights(
        lambda weights: weights | {n.replace(".1.", ".2."): w.clone() for n, w in weights.items() if ".layers.1." in n}
    ),
    r"its adapter does not fit the base model \(.*size mismatch .*; expected an adapter of Lla": weights(
        lambda weights: {n: torch.cat([w, w], 1 if ".lora_A." in n else 0) for n, w in weights.items()}
    ),
    r"its adapter does not fit the base model \(.*c_attn": config(target_modules=["c_attn"]),
    r"use_dora=True in adapter_config\.json; expected False or None, or merge the adapter": config(use_dora=True),
    r"modules_to_save=\['lm_head'\] in .*; expected None, or merge the adapter": config(modules_to_save=["lm_head"]),
    r"lora_embedding_A .* on linear layers, or merge the adap": renamed("lora_A.weight", "lora_embedding_A"),
}


@pytest.mark.parametrize("message", ADAPTERS)
def test_adapters_that_are_not_read_are_refused(message: str, adapter: Path) -> None:
    """peft would leave the base model's layers as they are."""
    ADAPTERS[message](adapter)
    with pytest.raises(ConfigError, match=message):
        load_target(str(adapter))


@pytest.mark.parametrize("empty", [None, [], {}])
def test_empty_values_of_an_adapters_config_mean_none(empty: Any, adapter: Path) -> None:
    expected = load_target(str(adapter)).model(torch.arange(3, 20)[None]).logits
    rewrite_config(adapter, modules_to_save=empty, rank_pattern=empty, loftq_config=empty)
    assert torch.equal(load_target(str(adapter)).model(torch.arange(3, 20)[None]).logits, expected)


def rewrite_config(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
