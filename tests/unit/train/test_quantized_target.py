"""Quantized targets: what they save, and that drafters remain those of the target itself."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import make_llama
from run_results import losses_of
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from draftsmith.decode.decoder import SpeculativeDecoder
from draftsmith.distill import quantization
from draftsmith.distill.load_target import load_target
from draftsmith.distill.quantization import quantize, quantized_matrices, require_quantization, saved_bytes
from draftsmith.errors import ConfigError
from draftsmith.heads.checkpoint import load_drafter
from draftsmith.heads.draft_model import DraftModel, EarlyExit
from draftsmith.provenance import fingerprint_of_numbers, model_fingerprints
from draftsmith.train.placement import placement_of
from draftsmith.train.recipe import load_recipe
from draftsmith.train.trainer import train

CPU = torch.device("cpu")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


def stored_bytes(model: LlamaForCausalLM) -> int:
    """Bytes of all weights, those of quantized ones by their parts."""
    sizes = 0
    for weight in model.parameters():
        parts = [weight.qdata, weight.scale] if hasattr(weight, "qdata") else [weight]
        sizes += sum(part.numel() * part.element_size() for part in parts)
    return sizes


@needs_torchao
def test_what_is_saved_and_what_stays() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        whole, model = (make_llama(intermediate_size=80).to(dtype).requires_grad_(False) for _ in range(2))
        saved = saved_bytes(model, "int8")
        quantize(model, "int8", CPU)
        assert stored_bytes(whole) - stored_bytes(model) == saved
        for name, weight in model.named_parameters():
            assert not weight.requires_grad
            assert hasattr(weight, "qdata") == ("proj" in name), "embeddings, norms and lm_head are as they were"
            if not hasattr(weight, "qdata"):
                assert torch.equal(weight, whole.get_parameter(name))
        vars(model)["draftsmith_fingerprints"] = model_fingerprints(whole)
        assert fingerprint_of_numbers(model) != fingerprint_of_numbers(whole), "caches are its own"


@needs_torchao
def test_a_run_saves_a_drafter_of_the_target_itself(
    recipe_file: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    short = ["train.steps=2", "evaluation.count=1", "teacher.kind=cached", "drafter.type=medusa"]
    train(load_recipe(str(recipe_file), [*short, "target.quantization=int8"]))
    target = load_target(str(tiny_target_folder), device="cpu")
    drafter = load_drafter(str(tmp_path / "run" / "drafter"), target.model, target.tokenizer)
    SpeculativeDecoder(target.model, drafter).generate([5, 6, 7], max_new_tokens=4)
    train(load_recipe(str(recipe_file), [*short, f"output={tmp_path / 'plain'}"]))
    assert len(list((tmp_path / "cache" / "signals").iterdir())) == 2, "states of the quantized target are not reused"
    plain, quantized = (losses_of(tmp_path / name)[0] for name in ("plain", "run"))
    assert plain != quantized
    recipe = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())["draftsmith"]["recipe"]
    assert recipe["target"]["quantization"] == "int8"


@needs_torchao
def test_the_teacher_and_the_evaluation_read_the_quantized_target(recipe_file: Path, tiny_target_folder: Path) -> None:
    recipe = load_recipe(str(recipe_file), ["target.quantization=int8"])
    target, expected = (load_target(str(tiny_target_folder), device="cpu") for _ in range(2))
    placement = placement_of(recipe.target, Accelerator(cpu=True))
    assert placement.load_to == CPU
    placement.place(target.model)
    quantize(expected.model, "int8", CPU)
    ids = torch.arange(3, 9)[None]
    assert torch.equal(target.model(ids).logits, expected.model(ids).logits)


@needs_torchao
def test_greedy_text_is_that_of_the_quantized_model() -> None:
    """Weights only: where activations are rounded too, a text read token by token differs from one read in blocks."""
    target = make_llama(hidden_size=64, intermediate_size=128)
    quantize(target, "int8", CPU)
    for drafter in (DraftModel(make_llama(1)), EarlyExit(target, layers=1)):
        decoder = SpeculativeDecoder(target, drafter, policy="best-first")
        for prompt in ([5, 6, 7], [9, 8], [20] * 6):
            ids, options = torch.tensor([prompt]), {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
            expected = target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :]
            assert decoder.generate(prompt, max_new_tokens=40).tokens == expected.tolist()


def test_what_cannot_be_quantized_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64, "n_positions": 32}
    with pytest.raises(ConfigError, match=r"int8 with GPT2LMHeadModel, which has 0% of its layers' weights in linear"):
        quantized_matrices(GPT2LMHeadModel(GPT2Config(**sizes)), "int8")
    uneven = make_llama(intermediate_size=72)
    assert len(quantized_matrices(uneven, "int8")) == 14
    with pytest.raises(ConfigError, match="float8 with LlamaForCausalLM"):
        quantized_matrices(uneven, "float8")
    assert len(quantized_matrices(make_llama(), "float8")) == 14
    with pytest.raises(ConfigError, match=r"float8 with target\.dtype=float32; expected bfloat16"):
        require_quantization("float8", "float32")
    monkeypatch.setattr(quantization, "find_spec", lambda name: object())
    require_quantization("int8", "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"float8 without a GPU that multiplies float8 \(CUDA.*expected int8"):
        require_quantization("float8", "bfloat16")
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"int8 needs torchao; expected null, or: pip install"):
        require_quantization("int8", "float32")
