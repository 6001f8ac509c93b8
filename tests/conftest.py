"""Fixtures: a real but tiny target, its tokenizer, and both in a folder."""

import gc
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import quiet  # noqa: F401 - before transformers is imported

# isort: split
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from commands import write_prompts
from hub_server import hub  # noqa: F401 - a fixture for all
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.decode.passes import capability
from draftsmith.decode.passes.attention import passes_of

VOCAB = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
"""Rotary positions that are computed in another way, with the same weights."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
Values = dict[str, Any] | None


def make_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random Llama in fp32. Large initial weights make its distributions far from flat."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **ids, "initializer_range": 0.2, **changes})).eval()


def noisy_llama(scale: float = 0.3, **changes: object) -> LlamaForCausalLM:
    """Return `make_llama` with noise on its weights: as a draft model, right often and wrong often."""
    noisy = make_llama(**changes)
    with torch.no_grad():
        for parameter, noise in zip(noisy.parameters(), make_llama(1, **changes).parameters(), strict=True):
            parameter.add_(noise, alpha=scale)
    return noisy


def make_t5(layers: int, **changes: object) -> T5ForConditionalGeneration:
    """Return a random T5 of the tiny vocabulary."""
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
    torch.manual_seed(layers)
    return T5ForConditionalGeneration(T5Config(num_layers=layers, **sizes, **changes)).eval()


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return `cases` as parameters. All are marked slow but `fast`, which stand for the others in `make test`."""
    cases = list(cases)
    assert set(fast) <= set(cases), f"{set(fast) - set(cases)}: no such case"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def spread(first: Iterable[Any], second: Iterable[Any], each: int = 1) -> list[Any]:
    """Return all pairs as parameters; in `make test` each of `first` has `each` of `second`, in turns.

    The other pairs are marked slow.
    """
    others = list(second)
    pairs = []
    for place, one in enumerate(first):
        fast = {(place * each + turn) % len(others) for turn in range(each)}
        marks = [() if number in fast else pytest.mark.slow for number in range(len(others))]
        pairs += [pytest.param(one, other, marks=mark) for other, mark in zip(others, marks, strict=True)]
    return pairs


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection: each full collection of half a million takes 0.5 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate keeps one state a process, with the precision of the first run; each test begins anew."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True, scope="session")
def _equal_models_are_measured_once() -> Iterator[None]:
    """Tests make the same model hundreds of times: what one of them can verify holds for its equals.

    Models are equal if their class, configuration, weights and device are. A refusal is found anew each time, and so is
    everything where operators are watched, or weights are offloaded or quantized.
    """
    measure, known = capability._measured, {}

    def measured(model: PreTrainedModel) -> capability.Capability:
        other = any(weight.is_meta or type(weight.data) is not torch.Tensor for weight in model.parameters())
        if other or _get_current_dispatch_mode() is not None:
            return measure(model)
        key = _identity(model)
        if key not in known:
            known[key] = measure(model)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capability, "_measured", measured)
        yield


def _identity(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return the key of `measured`, with the attention functions that a test replaces; NaN is equal to nothing."""
    weights = torch.stack([weight.detach().double().sum() for weight in model.state_dict().values()]).tolist()
    config = model.config.to_json_string(use_diff=False)
    attention = (model.config._attn_implementation, *AttentionInterface._global_mapping.items())
    return type(model), passes_of(model), attention, model.device, model.dtype, config, *weights


@pytest.fixture
def tiny_target() -> LlamaForCausalLM:
    return make_llama()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: pad, eos, and 62 single characters; unknown characters become pad."""
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    vocabulary = {"<pad>": 0, "<eos>": 1, **{letter: index + 2 for index, letter in enumerate(letters)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


@pytest.fixture
def tiny_target_folder(tmp_path: Path, tiny_target: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path / "tiny-target"
    tiny_target.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def without_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process do not estimate their memory, which takes longer than training on a tiny target.

    The estimate has tests of its own, and some runs of shipped recipes make it.
    """
    monkeypatch.setattr("draftsmith.train.estimate.memory.announce_memory", lambda context: None)


@pytest.fixture
def pictures_of_a_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are made and not drawn, in this process: to draw them takes half of the time of `push`."""
    pixel = io.BytesIO()
    Image.new("L", (1, 1)).save(pixel, "png")
    monkeypatch.setattr("draftsmith.eval.plots.Plot.png", pixel.getvalue())


@pytest.fixture
def recipe_file(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, without_estimate: None
) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return write_recipe(tmp_path, tiny_target_folder)


def write_recipe(place: Path, target: Path, evaluation: Values = None, data: Values = None, **train: Any) -> Path:
    """Write prompts, and a recipe for a draft model with other values in these sections; return its path."""
    texts = [LETTERS[i % 26 :][:4] + LETTERS[(3 * i + i // 26) % 26] for i in range(40)]
    prompts = str(write_prompts(place / "prompts.jsonl", *texts))
    rates = {"optimizer": "adamw", "learning_rate": 3e-3, "mixed_precision": "no", "draft_length": 3}
    recipe = {
        "name": "tiny",
        "output": str(place / "run"),
        "target": {"model": str(target)},
        "drafter": {"type": "draft_model"},
        "data": {"prompts": prompts, "prompt_tokens": 16, "response_tokens": 24, **(data or {})},
        "train": {"steps": 12, "batch_size": 8, "evaluate_every": 6, "checkpoint_every": 4, **rates, **train},
        "evaluation": {"count": 4, "max_new_tokens": 8, **(evaluation or {})},
    }
    file = place / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file
