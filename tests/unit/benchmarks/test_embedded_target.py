"""The script that trains the embedded target, at a small size: a few packages, a small model, a few steps."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.distill.embedded import embedded_target, read_modules
from draftsmith.distill.load_target import load_target

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from embedded_target import EmbeddedRecipe, Stage, build, encode_corpus, heldout_loss

sys.path.pop()

MINIATURE = EmbeddedRecipe(
    vocab_size=320,
    hidden_size=16,
    intermediate_size=32,
    num_attention_heads=2,
    max_position_embeddings=64,
    stages=(
        Stage(layers=1, steps=3, batch_size=2, sequence_length=32),
        Stage(layers=2, steps=3, batch_size=2, sequence_length=32),
    ),
    packages=("json", "wsgiref", "tomllib", "wave"),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the small target."""
    folder = tmp_path_factory.mktemp("target") / "built"
    build(folder, MINIATURE, progress=False)
    return folder


def test_loads_with_transformers_and_records_its_build(built):
    tokenizer = AutoTokenizer.from_pretrained(built)
    text = "def f(x):\n\treturn  x ** 2  # naïve ≤ 日本 🙂\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.num_hidden_layers == 2
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 320
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, name) == getattr(tokenizer, name) == getattr(model.generation_config, name)
    assert 0 < json.loads((built / "build.json").read_text())["heldout_loss"] < 8


@pytest.mark.slow
def test_shipped_weights_are_those_of_the_recipe():
    """And they predict held-out code of this Python as well as build.json says, on another processor's rounding."""
    folder, recipe = embedded_target(), EmbeddedRecipe()
    info = json.loads((folder / "build.json").read_text())
    assert EmbeddedRecipe(**{**info["recipe"], "stages": tuple(Stage(**s) for s in info["recipe"]["stages"])}) == recipe
    weights = folder / "model.safetensors"
    assert weights.stat().st_size < 20e6
    assert {load_file(weights)[name].dtype for name in load_file(weights)} == {torch.bfloat16}
    target = load_target("embedded")
    assert target.model.dtype == torch.float32
    assert target.model.config.num_hidden_layers == recipe.stages[-1].layers
    texts = [module.text for module in read_modules("heldout")]
    assert heldout_loss(target.model, encode_corpus(target.tokenizer, texts), 256) < info["heldout_loss"] + 0.2
