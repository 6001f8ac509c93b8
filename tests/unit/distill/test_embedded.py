"""The embedded target at a small size: a few packages, a small model, a few steps."""

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftsmith.distill.embedded import embedded_prompts, embedded_target
from draftsmith.distill.embedded.build import build
from draftsmith.distill.embedded.corpus import code_of, read_modules
from draftsmith.distill.embedded.training import (
    EmbeddedRecipe,
    Stage,
    batches,
    encode_corpus,
    grow,
    heldout_loss,
    model_config,
)
from draftsmith.distill.load_target import load_target
from draftsmith.errors import ConfigError

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


@pytest.fixture(scope="module")
def tokenizer(built):
    return AutoTokenizer.from_pretrained(built)


def test_no_module_is_in_both_splits():
    train, heldout = read_modules("train"), read_modules("heldout")
    assert not {module.path for module in train} & {module.path for module in heldout}
    share = sum(len(m.text) for m in heldout) / sum(len(m.text) for m in [*train, *heldout])
    assert 0.05 < share < 0.15
    assert len({module.kind for module in heldout}) >= 4


def test_no_tests_and_no_other_peoples_packages_in_the_corpus():
    paths = [module.path for split in ("train", "heldout") for module in read_modules(split)]
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.split("/"))]


def test_corpus_is_code_without_comments_and_docstrings():
    source = '"""Module."""\n# why\ndef f(x):\n    """Doc."""\n\nclass A:\n    """Doc."""\n    y = "# kept"  # no\n'
    assert code_of(source) == "def f(x):\n    pass\n\nclass A:\n    y = '# kept'\n"
    assert code_of('"""Module."""\n') == "pass\n"
    for module in read_modules("heldout"):
        assert code_of(module.text) == module.text, module.path


def test_loads_with_transformers_and_records_its_build(built, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(built)
    assert model.config.num_hidden_layers == 2
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == 320
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, name) == getattr(tokenizer, name) == getattr(model.generation_config, name)
    info = json.loads((built / "build.json").read_text())
    assert 0 < info["heldout_loss"] < 8
    assert info["precision"] in ("bf16 autocast", "fp32")


def test_tokenizer_gives_every_text_back(tokenizer):
    for text in ("def f(x):\n\treturn  x ** 2  # naïve ≤ 日本 🙂\n", "", " ", "\n\n    \n", "don 't . ,"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_same_seed_same_weights(built, tmp_path):
    torch.manual_seed(123)  # the caller's random state must neither matter nor change
    state = torch.get_rng_state()
    build(tmp_path / "again", MINIATURE, progress=False)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (built / name).read_bytes(), name
    assert torch.equal(torch.get_rng_state(), state)


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


def test_prompts_are_deterministic_and_exact(tokenizer):
    rows = embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=3)
    assert rows == embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=3)
    assert rows != embedded_prompts(tokenizer, "heldout", count=40, prompt_tokens=24, seed=4)
    assert {len(row.input_ids) for row in rows} == {24}
    assert len({row.id for row in rows}) == 40
    heldout = {module.path: module for module in read_modules("heldout")}
    per_module = Counter(row.id.rsplit(":", 1)[0] for row in rows)
    assert set(per_module) <= set(heldout)
    assert max(per_module.values()) <= 2  # more than 20 held-out modules are long enough
    for row in rows:
        path, line = row.id.rsplit(":", 1)
        rest = "".join(heldout[path].text.splitlines(keepends=True)[int(line) - 1 :])
        assert rest.startswith(tokenizer.decode(row.input_ids).rstrip("\N{REPLACEMENT CHARACTER}"))
        assert row.category == heldout[path].kind


@pytest.mark.parametrize(("count", "length", "key"), [(0, 8, "count"), (1, 0, "prompt_tokens"), (1, 10**6, "count")])
def test_impossible_prompts_are_refused(tokenizer, count, length, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        embedded_prompts(tokenizer, "heldout", count=count, prompt_tokens=length)


def test_growing_by_repeated_blocks_nearly_keeps_the_function(tokenizer):
    torch.manual_seed(0)
    model = LlamaForCausalLM(model_config(MINIATURE, tokenizer, 2)).eval()
    deeper = grow(model, 6).eval()
    ids = torch.arange(20)[None]
    before, after = model(ids).logits, deeper(ids).logits
    # 0.02-sized random blocks move the residual little, so that splitting their update changes it to second order only.
    assert (after - before).abs().max() < 0.05 * before.abs().max()
    assert deeper.config.num_hidden_layers == 6


def test_an_epoch_visits_every_piece_once():
    stage = Stage(layers=1, steps=1, batch_size=3, sequence_length=9)
    tokens = torch.arange(100)
    source = batches(tokens, stage, seed=0)
    seen = torch.cat([next(source) for _ in range(3)])
    assert seen.shape == (9, 10)
    assert len(set(seen[:, 0].tolist())) == 9
    assert torch.equal(seen - seen[:, :1], torch.arange(10).expand(9, 10))
