"""Targets without layers: their last norm, lm_head and embeddings are those of the whole model, and refusals."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import make_llama, make_tokenizer
from gguf_files import tiny_llama, write_gguf
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from draftsmith.distill.layerless import finish_of, has_layers, load_without_layers
from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import final_states, layers_of
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.model_config import eos_tokens, text_config
from draftsmith.provenance import outside_fingerprints

sys.path.insert(0, str(Path(__file__).parents[2]))
from targets.tiny import model_classes, tiny_config

FAST = ["LlamaForCausalLM", "Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "CohereForCausalLM"]
FAST += ["GraniteForCausalLM", "Qwen3NextForCausalLM", "GPT2LMHeadModel", "MiniCPM3ForCausalLM"]
OTHERS = [name for name in model_classes() if name not in FAST]
MOST = 20_000_000
WITHOUT_NORM = {"BltForCausalLM", "DeepseekV4ForCausalLM", "DoryForCausalLM", "HYV4ForCausalLM", "Inkling2ForCausalLM"}
WITHOUT_NORM |= {"Inkling2LoopForCausalLM", "XLMWithLMHeadModel"}
"""Classes in which more than a norm lies between the last layer and the lm_head, and that do not show it."""


def random_model(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_states_of_the_last_layer_become_the_final_ones(name: str, tmp_path: Path) -> None:
    """Or the class is refused; exactly, for every class of transformers that generates text."""
    kind = model_classes().get(name)
    if kind is None or name in WITHOUT_NORM:
        pytest.skip("not in this version, or listed")
    try:
        with torch.device("meta"):  # some configs keep the sizes of a part
            assert sum(it.numel() for it in kind._from_config(tiny_config(kind)).parameters()) < MOST
        whole = random_model(kind, tiny_config(kind))
        assert layers_of(whole)
        assert not whole.config.is_encoder_decoder
    except Exception:  # whatever transformers raises for such a small config; `python -m tests.targets` lists them
        pytest.skip("not built")
    bare: PreTrainedModel | None = None
    whole.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with suppress(ConfigError):
        bare = load_without_layers(str(tmp_path)).model
    if bare is None:
        return  # refused
    whole = kind.from_pretrained(tmp_path).eval()  # some set the row of the padding token to zero
    states: list[torch.Tensor] = []
    layers_of(whole)[-1].register_forward_hook(
        lambda _m, _a, out: states.append(out if torch.is_tensor(out) else out[0])
    )
    ids = torch.arange(3, 19)[None]
    expected = final_states(whole, ids, torch.ones_like(ids))
    final = finish_of(bare)(states[0])
    torch.testing.assert_close(final, expected, rtol=0, atol=1e-6)
    if not torch.equal(states[0], expected):  # else the norm is the last layer's own
        torch.testing.assert_close(finish_of(whole)(states[0]), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits_head(bare)(final), logits_head(whole)(expected), rtol=1e-6, atol=1e-5)
    assert torch.equal(bare.get_input_embeddings()(ids), whole.get_input_embeddings()(ids))
    assert text_config(bare).num_hidden_layers == text_config(whole).num_hidden_layers
    assert outside_fingerprints(bare) == outside_fingerprints(whole)
    assert not has_layers(bare)


def sharded(folder: Path) -> Path:
    model = make_llama(num_hidden_layers=6)
    model.save_pretrained(folder, max_shard_size="30KB")
    make_tokenizer().save_pretrained(folder)
    return folder


def test_only_the_files_with_its_tensors_are_opened(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "target")
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if ".layers." not in name}
    others = set(weight_map.values()) - needed
    assert others
    for file in others:
        (folder / file).unlink()
    loaded = load_without_layers(str(folder), dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert eos_tokens(loaded.model.config, loaded.model.generation_config)
    (folder / min(needed)).unlink()
    with pytest.raises(ConfigError, match=f"holds no {min(needed)}; expected weights in safetensors"):
        load_without_layers(str(folder))


def test_a_gguf_file_and_the_embedded_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    for name in (str(write_gguf(tmp_path / "target.gguf", tiny_llama())), "embedded"):
        bare, whole = load_without_layers(name).model, load_target(name, device="cpu").model
        assert outside_fingerprints(bare) == outside_fingerprints(whole)
        assert sum(it.numel() for it in bare.parameters()) < 0.5 * sum(it.numel() for it in whole.parameters())


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    file, whole = folder / "model.safetensors", load_file(folder / "model.safetensors")
    packed = {**whole, "lm_head.weight": whole["lm_head.weight"].to(torch.float8_e4m3fn)}
    save_file(packed, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head.weight are quantized \(torch.float8_e4m3fn\); .* target.head_from"):
        load_without_layers(str(folder))
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    other = tmp_path / "other"
    make_llama().save_pretrained(other)
    assert load_without_layers(str(folder), head_from=str(other)).model.lm_head.weight.dtype == torch.float32
    lost = {name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}
    save_file(lost, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"holds no tensor model.norm.weight; expected all outside of the layers"):
        load_without_layers(str(folder))
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_without_layers(str(tmp_path / "empty"))
