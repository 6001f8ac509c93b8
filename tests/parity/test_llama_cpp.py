"""GGUF files in llama.cpp: its Python binding computes the same logits, tokens and texts; its converter agrees.

The binding is `pip install llama-cpp-python` (0.3.36 has llama.cpp 0c1e57098). For the converter, set
DRAFTSMITH_LLAMA_CPP=/path/to/a/clone of llama.cpp, and install sentencepiece, which it imports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.llama_cpp_engine import Engine
from parity.test_exports import made
from parity.test_gguf import BYTES, SIZES, VOCAB, byte_tokenizer, draft_model, read, sequence, split, written
from parity.test_gguf import target as target
from parity.test_gguf_tokenizers import write_tokenizer
from piece_tokenizer import make_piece_tokenizer
from recording import decoded_confidences, decoded_logits
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import LlamaForCausalLM

from draftsmith.distill.load_target import load_tokenizer
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.gguf_tokenizers import SPLITTINGS
from draftsmith.hub.export import export_drafter

TEXTS = (
    "def f(x):\n    return x + 12  # hé 🙂\n\n\n",
    " I've  two   spaces, 12345 digits\t\tand\r\n lines",
    "'RE it's We'Ve!?",
)
LONG = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, scaled": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
    "llama, scaled as Llama 3": {"rope_parameters": LONG},
    "llama, YaRN": {"rope_parameters": YARN},
    "mistral": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
    "qwen3, YaRN": {"head_dim": 128, "rope_parameters": YARN},
}


def loaded(file: Path) -> Any:
    llama_cpp = pytest.importorskip("llama_cpp")
    whole = {"type_k": 0, "type_v": 0}  # caches in float32
    return llama_cpp.Llama(str(file), n_ctx=128, logits_all=True, verbose=False, n_threads=1, n_gpu_layers=0, **whole)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_logits_and_texts(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    drafter = draft_model(target, name.split(",")[0].split()[0], **MODELS[name])
    engine = loaded(written(drafter, target, tmp_path / "out").folder / "drafter.gguf")
    ids = torch.randint(2, VOCAB - 40, (60,), generator=torch.Generator().manual_seed(0))
    engine.eval(ids.tolist())
    logits = drafter.model(ids[None]).logits[0]
    # Sums of fp32 in another order: 1e-6 to 4e-6 of logits up to 5 were measured.
    assert torch.allclose(torch.tensor(engine.scores[:60]), logits, atol=5e-5)
    text = drafter.model.generate(ids[None, :20], do_sample=False, max_new_tokens=24, eos_token_id=None)[0, 20:]
    engine.reset()
    drawn = engine.generate(ids[:20].tolist(), temp=0.0, repeat_penalty=1.0)
    assert [next(drawn) for _ in range(24)] == text.tolist()


MORE = (("1", "2"), ("12", "3"), ("123", "4"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "Ġ"), ("'", "v"))
DIGITS = pre_tokenizers.Digits(individual_digits=True)
PIECES = make_piece_tokenizer(metaspace=False, fallback=bytes(range(256)))
TOKENIZERS = {
    "GPT-2": byte_tokenizer(more=MORE),
    "SmolLM": byte_tokenizer(sequence(DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False)), MORE),
    "Llama 3": byte_tokenizer(sequence(split(r"\p{N}{1,3}"), BYTES), MORE, ignore_merges=True),
    "Qwen2": byte_tokenizer(sequence(split(r"\p{N}"), BYTES), MORE),
    "Llama 2": PIECES,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_same_tokens(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """The byte-level vocabulary has merges that cross the borders of each splitting."""
    wide = made("draft_model", target, config={"model_type": "llama", **SIZES})
    wide.vocab_size = 400
    wide.model.resize_token_embeddings(400)
    file = written(wide, target, tmp_path / "out", tokenizer=TOKENIZERS[name]).folder / "drafter.gguf"
    engine = loaded(file)
    for text in TEXTS:
        assert engine.tokenize(text.encode(), add_bos=False, special=False) == TOKENIZERS[name](text)["input_ids"], text


PAGE = """def f(x): return x**2 + 3.14159  # it's 1234567, don't, WE'LL  go
\n\t tab\r\nCamelCaseWord snake_case HTTPServer
价格是123元，你好世界。日本語テキスト 한국어 텍스트 😀👩\u200d👩\u200d👧 naïve café Ünïcödé 'tis they'Re ½ ² x²+y²
مرحبا ไทย
   trailing   """
MARKS = " a\u0301 हिन्दी"


def whole_page() -> dict[str, list[str]]:
    """Return a byte-level vocabulary whose merges cross every border at which the page may be split."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=900, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PAGE, MARKS, *PAGE.split(" "), *PAGE.splitlines()] * 2, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return {"tokens": list(model["vocab"]), "merges": [" ".join(pair) for pair in model["merges"]]}


def test_every_splitting_that_is_read(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    keys = whole_page()
    for name, splitting in SPLITTINGS.items():
        file = write_tokenizer(tmp_path / f"{name}.gguf", "gpt2", name, **keys)
        engine = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
        # Where words are split before capitals, llama.cpp takes no mark for a part of a word, as the models' own do.
        page = PAGE + MARKS * (r"\p{Lu}\p{Lt}\p{Lm}" not in "".join(splitting.steps))
        found = load_tokenizer(str(file))[0](page)["input_ids"]
        assert found == engine.tokenize(page.encode(), add_bos=True, special=True), name


HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"layers": [2, 4, 5]}),
    "eagle3 of 40 tokens, with norms": (
        "eagle3",
        {"draft_vocabulary": list(range(5, 85, 2)), "norm_before_residual": True, "norm_before_fc": True},
    ),
    "dflash": ("dflash", {"block_size": 4}),
    "dspark from the anchor": ("dflash", {"markov_rank": 5, "confidence_head": True, "sample_from_anchor": True}),
    "dspark of 40 tokens": ("dflash", {"markov_rank": 5, "draft_vocabulary": list(range(5, 85, 2))}),
}


MASK, READ, AFTER = 17, [5, 290, 33, 120, 11, 9, 8], [23, 60, 31, 7]


def engine_of(drafter: TrainableDrafter, target: LlamaForCausalLM, tmp_path: Path) -> Engine:
    """llama.cpp with the target, written as a draft model of itself, and the drafter."""
    llama_cpp = pytest.importorskip("llama_cpp")
    own = written(DraftModel(target), target, tmp_path / "target").folder / "drafter.gguf"
    return Engine(llama_cpp, own, written(drafter, target, tmp_path / "drafter").folder / "drafter.gguf")


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Sums of fp32 in another order: 3e-6 to 4e-6 of logits up to 5 were measured."""
    return torch.equal(ours.isinf(), theirs.isinf()) and bool((ours - theirs).nan_to_num(0.0).abs().max() < 5e-5)


@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("eagle3")])
def test_eagle3_drafts_the_same(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Features of the same layers, and logits along a chain of drafted tokens."""
    drafter = made("eagle3", target, **HEADS[name][1])
    theirs = engine_of(drafter, target, tmp_path).eagle3(READ, AFTER[:3])
    assert close(decoded_logits(drafter, target, READ, AFTER), theirs)


@pytest.mark.parametrize("trained", [True, False], ids=["trained mask", "a token's mask"])
@pytest.mark.parametrize("name", [name for name in HEADS if name.startswith("d")])
def test_blocks_are_drafted_the_same(name: str, trained: bool, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Logits along the tokens that llama.cpp's Markov head chooses, and the confidence in them."""
    options = {"trained_mask": True} if trained else {"mask_token": MASK}
    drafter = made("dflash", target, **{"block_size": 4, **options, **HEADS[name][1]})
    engine, mask = engine_of(drafter, target, tmp_path), VOCAB - 1 if trained else MASK
    logits, confidences = engine.block(READ, AFTER[0], mask, 4)
    first = drafter.body.first
    chosen = logits[first:].argmax(-1).tolist()
    assert close(decoded_logits(drafter, target, READ, [AFTER[0], *chosen]), logits[first:])
    if drafter.confidence is not None:
        ours = torch.stack(decoded_confidences(drafter, chosen[:-1]))
        assert torch.allclose(ours, confidences[first + 1 :], atol=1e-5)


CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import conversion.base, convert_hf_to_gguf, transformers
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows published tokenizers only
fast = transformers.PreTrainedTokenizerFast.from_pretrained  # by the type of a model, another may be chosen
transformers.AutoTokenizer.from_pretrained = staticmethod(lambda folder, **options: fast(folder))
sys.argv = ["convert", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""
UNLIKE = {"general.name", "general.size_label", "general.tags", "GGUF.kv_count", "tokenizer.ggml.add_bos_token"}
"""Keys that differ: names, and add_bos_token, which the converter omits where the tokenizer's config does."""


def converted(source: Path, target: Path, file: Path, dtype: str) -> Path:
    clone = os.environ.get("DRAFTSMITH_LLAMA_CPP")
    if clone is None:
        pytest.skip("DRAFTSMITH_LLAMA_CPP is not set")
    command = [sys.executable, "-c", CONVERT, clone, str(source), "--outfile", str(file), "--outtype", dtype]
    subprocess.run([*command, "--target-model-dir", str(target)], check=True, capture_output=True)
    return file


PAIRS = [(name, "float32") for name in [*MODELS, *HEADS]] + [
    (name, "bfloat16") for name in ("llama", "eagle3", "dflash")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_the_converter_writes_the_same(name: str, dtype: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    tokenizer = byte_tokenizer()
    kind, options = HEADS.get(name, ("draft_model", {}))
    if name in MODELS:
        drafter = draft_model(target, name.split(",")[0].split()[0], **MODELS[name])
    else:
        masked = {"mask_token": 17} if kind == "dflash" else {}
        drafter = made(kind, target, **options, **masked)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    ours = written(drafter, target, tmp_path / "ours", dtype, tokenizer=tokenizer).folder
    format = "transformers" if kind == "draft_model" else "vllm"
    given = {"target_name": "org/target", "tokenizer": tokenizer, "dtype": dtype}
    source = export_drafter(drafter, target, format, tmp_path / "source", **given).folder
    if name == "dflash":  # z-lab's layout: the converter does not know speculators' DFlash
        config = json.loads((source / "config.json").read_text())
        own = {"mask_token_id": 17, "target_layer_ids": [layer - 1 for layer in drafter.needs.layers]}
        flat = config["transformer_layer_config"] | {"model_type": "qwen3", "block_size": 4, "dflash_config": own}
        (source / "config.json").write_text(json.dumps(flat | {"architectures": ["DFlashDraftModel"]}))
    (tmp_path / "theirs").mkdir()
    file = tmp_path / "theirs" / "drafter.gguf"
    converted(source, tmp_path / "target", file, {"float32": "f32", "bfloat16": "bf16"}[dtype])
    (our_keys, our_tensors), (their_keys, their_tensors) = read(ours), read(file.parent)
    for key in their_keys.keys() - UNLIKE:
        assert our_keys[key] == their_keys[key], key
    extra = {key.partition(".")[2] for key in our_keys.keys() - their_keys.keys() - UNLIKE}
    assert extra <= {"attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"}
    assert our_tensors.keys() == their_tensors.keys()
    for part, value in our_tensors.items():
        assert value.dtype == their_tensors[part].dtype
        # The factors of Llama 3's positions are the quotient of two roundings; everything else is bit-equal.
        room = 1e-6 if part == "rope_freqs.weight" else 0
        assert torch.allclose(value.double(), their_tensors[part].double(), rtol=room, atol=0), part
