"""GGUF files as targets: the dequantized weights, the file's tokenizer, template and end token, and refusals."""

import json
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow
from gguf_files import TEMPLATE, tiny_llama, write_gguf
from transformers import LlamaForCausalLM

from draftsmith.distill.load_target import load_target, load_tokenizer
from draftsmith.errors import ConfigError
from draftsmith.names import check_target_name

gguf = pytest.importorskip("gguf")
PROMPT = torch.tensor([[5, 290, 33, 2, 5, 120]])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def file(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "target.gguf", model)


@torch.no_grad()
def test_a_file_is_the_model_that_was_written(model: LlamaForCausalLM, file: Path) -> None:
    loaded = load_target(str(file), device="cpu")
    torch.testing.assert_close(loaded.model(PROMPT).logits, model(PROMPT).logits, rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.name == str(file)
    assert loaded.revision is not None
    assert loaded.revision.startswith("sha256:")


@pytest.mark.parametrize("kind", mostly_slow(["Q8_0", "Q4_0", "Q4_1", "Q5_0", "F16", "BF16"], "Q4_1", "BF16"))
def test_quantized_weights_are_those_that_ggml_dequantizes(kind: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "target.gguf", model, kind)
    loaded = load_target(str(file), device="cpu").model
    (stored,) = (part for part in gguf.GGUFReader(file).tensors if part.name == "blk.1.ffn_down.weight")
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
    torch.testing.assert_close(loaded.model.layers[1].mlp.down_proj.weight.data, expected, rtol=0, atol=1e-6)
    own = model.model.layers[1].mlp.down_proj.weight
    assert (expected - own).abs().max() < 0.2, "the test's own file holds the model"


def test_tokenizer_template_and_end_token_are_those_of_the_file(model: LlamaForCausalLM, file: Path) -> None:
    tokenizer, config = load_tokenizer(str(file))
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|eos|>", 1)
    loaded = load_target(str(file), device="cpu")
    assert config.vocab_size == loaded.model.config.vocab_size == 300
    assert loaded.model.generation_config.eos_token_id == 1
    assert loaded.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert sorted(tokenizer.get_vocab().values()) == list(range(300)), "no token that the model does not have"


def test_the_config_alone_needs_no_weights(file: Path, cache: Path) -> None:
    load_tokenizer(str(file))
    assert not list(cache.rglob("*.safetensors"))


def test_a_folder_with_one_file_is_that_file(model: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = write_gguf(tmp_path / "folder" / "target.gguf", model).parent
    assert load_target(str(folder), device="cpu").revision is not None
    (folder / "other.gguf").write_bytes((folder / "target.gguf").read_bytes())
    with pytest.raises(ConfigError, match=r"has 2 GGUF files and no config.json.*other.gguf, target.gguf"):
        load_target(str(folder))


def test_another_file_of_the_same_name_is_another_target(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    first = load_target(str(file), device="cpu")
    file.unlink()
    write_gguf(tmp_path / "second" / "target.gguf", model, "Q4_0").rename(file)
    second = load_target(str(file), device="cpu")
    assert first.revision != second.revision
    assert not torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


def test_a_second_load_reads_the_cache(file: Path, cache: Path) -> None:
    """The stored config is changed by hand: a target that was dequantized again would not have the change."""
    load_target(str(file), dtype="bfloat16", device="cpu")
    (stored,) = cache.glob("gguf/*/bfloat16/config.json")
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "rms_norm_eps": 0.125}))
    assert load_target(str(file), dtype="bfloat16", device="cpu").model.config.rms_norm_eps == 0.125


@pytest.mark.parametrize("kept", [0, 3, 100, 20_000])
def test_a_broken_file_is_refused_in_one_line(kept: int, file: Path) -> None:
    whole = file.read_bytes()
    assert kept < len(whole)
    file.write_bytes(whole[:kept])
    with pytest.raises(ConfigError, match=r"target\.gguf.*GGUF") as caught:
        load_target(str(file))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_architecture_that_is_not_known_is_named(file: Path) -> None:
    length = (5).to_bytes(8, "little")
    file.write_bytes(file.read_bytes().replace(length + b"llama", length + b"zzama", 1))
    with pytest.raises(ConfigError, match="zzama"):
        load_target(str(file))


def test_a_missing_file_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.gguf; expected a GGUF file, and there is no such file"):
        check_target_name(str(tmp_path / "no.gguf"))
    check_target_name("user/repository/file.gguf")  # on the Hub


def test_a_file_without_a_tensor_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "target.gguf", model, "Q8_0", without="blk.1.ffn_down.weight")
    with pytest.raises(ConfigError, match=r"has no tensor model\.layers\.1\.mlp\.down_proj\.weight"):
        load_target(str(file))


def test_one_of_several_parts_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "target-00001-of-00002.gguf", model)
    with pytest.raises(ConfigError, match="one of several parts; expected one file"):
        load_target(str(file))
