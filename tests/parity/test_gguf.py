"""GGUF files: names, shapes and keys of llama.cpp's converter, read back with the package gguf and by transformers."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_llama, spread
from packaging.version import Version
from parity.test_exports import exported, made
from piece_tokenizer import make_piece_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith import ConfigError
from draftsmith.cli import main
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.formats.gguf_tokenizers import LETTERS, REST, tokenizer_metadata
from draftsmith.hub.export import Exported, export_drafter

gguf = pytest.importorskip("gguf")

VOCAB, HIDDEN, HEAD = 300, 32, 8
PROMPT = torch.tensor([[5, 290, 33, 2, 5, 120]])
TEXT = "def f(x):\n    return x + 12  # hé 🙂"
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 128, "initializer_range": 0.2}


def byte_tokenizer(
    split: Any = None, more: tuple[tuple[str, str], ...] = (), **changes: Any
) -> PreTrainedTokenizerFast:
    """Byte-level: 2 special tokens, 256 bytes, 3 pairs and 2 added tokens; by default split as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("r", "e"), ("Ġ", "x"), ("re", "t"), *more]
    pieces = ["<|pad|>", "<|eos|>", *alphabet, *("".join(pair) for pair in merges)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **changes))
    tokenizer.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|eos|>"])
    tokenizer.add_tokens(["<tool>", "<|note|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|eos|>")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return make_llama(**SIZES | {"num_hidden_layers": 8, "head_dim": HEAD}).requires_grad_(False)


def written(
    drafter: TrainableDrafter, target: LlamaForCausalLM, out: Path, dtype: str | None = None, **changes: Any
) -> Exported:
    given = {"target_name": "org/target", "tokenizer": byte_tokenizer(), "dtype": dtype, **changes}
    return export_drafter(drafter, target, "gguf", out, **given)


def read(out: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The values of a file's keys, and its tensors with their own dtypes."""
    reader = gguf.GGUFReader(out / "drafter.gguf")
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
    tensors = {}
    for part in reader.tensors:
        raw = torch.from_numpy(part.data.copy().view("uint8").reshape(-1))
        tensors[part.name] = raw.view(dtypes[part.tensor_type.name]).reshape(part.shape.tolist()[::-1])
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def draft_model(target: LlamaForCausalLM, kind: str, **changes: Any) -> TrainableDrafter:
    return made("draft_model", target, config={"model_type": kind, **SIZES, **changes})


def neighbours(rows: Tensor) -> Tensor:
    """The rows of queries or keys: pairs (i, i + d/2) of each head side by side."""
    order = [head + half for head in range(0, len(rows), HEAD) for i in range(HEAD // 2) for half in (i, i + HEAD // 2)]
    return rows[order]


LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
LAYER |= {f"self_attn.{p}_proj": f"attn_{p}" for p in "qkv"} | {f"self_attn.{p}_norm": f"attn_{p}_norm" for p in "qk"}
LAYER |= {f"mlp.{p}_proj": f"ffn_{p}" for p in ("gate", "up", "down")}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": HEAD},
    "llama with biases": {"head_dim": HEAD, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": HEAD, "sliding_window": None},
    "qwen2": {"head_dim": HEAD},
    "qwen3": {"head_dim": 128, "tie_word_embeddings": True},
}


def test_the_named_commands_write_target_and_drafter(
    tmp_path: Path, target: LlamaForCausalLM, capsys: pytest.CaptureFixture[str]
) -> None:
    """The note has a command for the target's file; the next one names the server's port and its alias."""
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    draft_model(target, "llama", head_dim=HEAD).model.save_pretrained(tmp_path / "drafter")
    name = str(tmp_path / "target")

    def export(*words: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["export", *words])
        assert not stopped.value.code
        return capsys.readouterr().out

    said = export(str(tmp_path / "drafter"), "--target", name, "--format", "gguf", "--out", str(tmp_path / "out"))
    assert f"--spec-type draft-simple --spec-draft-n-max 3 --metrics --alias {name}" in said
    assert said.endswith(f"next: draftsmith eval server http://localhost:8080 --target {name} --model {name}\n")
    (command,) = re.findall(r"`draftsmith export ([^`]*) --out FOLDER` writes it as FOLDER/drafter\.gguf", said)
    export(*shlex.split(command), "--out", str(tmp_path / "again"))
    assert torch.equal(read(tmp_path / "again")[1]["output.weight"], target.lm_head.weight)
    export("embedded", "--target", "embedded", "--format", "gguf", "--out", str(tmp_path / "embedded"))
    assert read(tmp_path / "embedded")[0]["llama.block_count"] == 20


@pytest.mark.parametrize(("name", "dtype"), spread(MODELS, ["float32", "bfloat16", "float16"]))
def test_every_tensor_of_a_draft_model(name: str, dtype: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """Renamed; rows of queries and keys of Llama in another order; norms and biases in float32."""
    kind = name.split()[0]
    drafter = draft_model(target, kind, **MODELS[name])
    result = written(drafter, target, tmp_path / "out", dtype)
    keys, tensors = read(result.folder)
    wanted = {}
    for part, value in drafter.model.state_dict().items():
        stem, _, suffix = part.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, own = stem.split(".", 3)
            if own in ("self_attn.q_proj", "self_attn.k_proj") and kind in ("llama", "mistral"):
                value = neighbours(value)
            stem = f"blk.{layer}.{LAYER[own]}"
        else:
            stem = WHOLE[stem]
        rounded = value.to(getattr(torch, dtype))
        wanted[f"{stem}.{suffix}"] = rounded.float() if value.dim() == 1 else rounded
    if kind == "qwen3":
        del wanted["output.weight"]  # tied
    assert tensors.keys() == wanted.keys() == result.tensors.keys()
    for part, value in wanted.items():
        assert tensors[part].dtype == value.dtype, part
        assert torch.equal(tensors[part], value), part
        assert result.tensors[part][1] == tuple(value.shape)
    arch = "llama" if kind == "mistral" else kind
    size = MODELS[name]["head_dim"]
    sizes = {"block_count": 2, "embedding_length": HIDDEN, "attention.head_count": 4, "attention.head_count_kv": 2}
    sizes |= {"attention.key_length": size, "attention.value_length": size, "rope.dimension_count": size}
    sizes |= {"rope.freq_base": 10000.0, "context_length": 128, "vocab_size": VOCAB, "feed_forward_length": 48}
    assert {key: keys[f"{arch}.{key}"] for key in sizes} == sizes
    assert keys[f"{arch}.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert keys["general.architecture"] == arch
    assert keys["general.file_type"] == {"float32": 0, "float16": 1, "bfloat16": 32}[dtype]
    assert "llama-server -m TARGET.gguf -md " in result.usage
    assert any("--spec-draft-sampling probabilistic" in note for note in result.serving.notes)
    assert "Import into draftsmith" not in (result.folder / "README.md").read_text()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    """transformers' reader of GGUF, which leaves out biases of Llama's layers and scaled positions."""
    drafter = draft_model(target, name, **MODELS[name])
    out = written(drafter, target, tmp_path / "out").folder
    again = AutoModelForCausalLM.from_pretrained(out, gguf_file="drafter.gguf", dtype=torch.float32)
    assert torch.equal(again(PROMPT).logits, drafter.model(PROMPT).logits)
    if Version(transformers.__version__) < Version("5.23") and name in ("llama", "mistral"):
        return  # 5.17 reads the tokenizer of a Llama with a BOS token only
    tokenizer = AutoTokenizer.from_pretrained(out, gguf_file="drafter.gguf")
    assert tokenizer(TEXT)["input_ids"] == byte_tokenizer()(TEXT)["input_ids"]


def test_scaled_positions(tmp_path: Path, target: LlamaForCausalLM) -> None:
    linear = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    keys, tensors = read(written(draft_model(target, "llama", rope_parameters=linear), target, tmp_path / "a").folder)
    assert (keys["llama.rope.scaling.type"], keys["llama.rope.scaling.factor"]) == ("linear", 2.0)
    yarn = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
    keys, _ = read(written(draft_model(target, "qwen3", rope_parameters=yarn), target, tmp_path / "b").folder)
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    assert {key: keys[f"qwen3.rope.scaling.{key}"] for key in scaling} == scaling
    llama3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    drafter = draft_model(target, "llama", rope_parameters=llama3)
    keys, tensors = read(written(drafter, target, tmp_path / "c").folder)
    assert "llama.rope.scaling.type" not in keys
    plain = torch.tensor([500.0 ** (-2 * i / HEAD) for i in range(HEAD // 2)])
    assert torch.allclose(plain / tensors["rope_freqs.weight"], drafter.model.model.rotary_emb.inv_freq, rtol=1e-6)
    assert tensors["rope_freqs.weight"][-1] == pytest.approx(8.0)


def test_the_tokenizer(tmp_path: Path, target: LlamaForCausalLM) -> None:
    keys, _ = read(written(draft_model(target, "llama"), target, tmp_path / "out").folder)
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in keys.items() if key.startswith("tokenizer.")}
    tokenizer = byte_tokenizer()
    assert own["tokens"][:261] == tokenizer.convert_ids_to_tokens(range(261))
    assert own["tokens"][261:264] == ["<tool>", "<|note|>", "[PAD263]"]
    assert (own["token_type"][:3], own["token_type"][260:264]) == ([3, 3, 1], [1, 4, 3, 5])
    assert len(own["tokens"]) == len(own["token_type"]) == VOCAB
    assert own["merges"] == ["r e", "Ġ x", "re t"]
    assert (own["model"], own["pre"], own["add_bos_token"]) == ("gpt2", "gpt-2", False)
    assert (own["eos_token_id"], own["padding_token_id"]) == (1, 0)
    assert not {"bos_token_id", "unknown_token_id"} & own.keys()


def test_a_first_token_is_declared() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<|eos|>"
    assert tokenizer_metadata(tokenizer, VOCAB)["tokenizer.ggml.add_bos_token"] is False
    first = processors.TemplateProcessing(single="<|eos|> $A", special_tokens=[("<|eos|>", 1)])
    tokenizer.backend_tokenizer.post_processor = first
    own = tokenizer_metadata(tokenizer, VOCAB)
    assert (own["tokenizer.ggml.add_bos_token"], own["tokenizer.ggml.bos_token_id"]) == (True, 1)


def sequence(*steps: Any) -> Any:
    return pre_tokenizers.Sequence(list(steps))


def split(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(f"{LETTERS}{digits}{REST}"), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def test_splits_have_names() -> None:
    def name(steps: Any, **changes: Any) -> str:
        return tokenizer_metadata(byte_tokenizer(steps, **changes), VOCAB)["tokenizer.ggml.pre"]

    assert name(sequence(split(r"\p{N}"), BYTES)) == "qwen2"
    assert name(sequence(split(r"\p{N}{1,3}"), BYTES), ignore_merges=True) == "llama-bpe"
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert name(sequence(digits, pre_tokenizers.ByteLevel(add_prefix_space=False))) == "smollm"


@pytest.mark.parametrize("metaspace", [True, False])
def test_pieces_of_sentencepiece(metaspace: bool) -> None:
    """The score of a piece falls with the rank of its merge; bytes, the unknown and special tokens have their types."""
    tokenizer = make_piece_tokenizer(metaspace=metaspace, fallback=bytes(range(256)))
    if metaspace:
        with pytest.raises(ConfigError, match="pieces that are not sentencepiece's"):
            tokenizer_metadata(tokenizer, 400)  # it splits texts at spaces, which llama.cpp does not
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    own = tokenizer_metadata(tokenizer, 400)
    model = {key.removeprefix("tokenizer.ggml."): value for key, value in own.items()}
    assert (model["model"], model["add_space_prefix"]) == ("llama", True)
    assert "merges" not in model
    rank = {piece: score for piece, score in zip(model["tokens"], model["scores"], strict=True)}
    assert (rank["\u2581a"], rank["\u2581b"], rank["a"]) == (0.0, -1.0, 0.0)
    kinds = dict(zip(model["tokens"], model["token_type"], strict=True))
    assert [kinds[piece] for piece in ("<pad>", "<eos>", "a", "<0x41>", "[PAD399]")] == [2, 3, 1, 6, 5]


REFUSED_TOKENIZERS: dict[str, tuple[Any, str]] = {
    "unknown split": (lambda: byte_tokenizer(sequence(split(r"\p{N}{1,2}"), BYTES)), "no known name in llama.cpp"),
    "no split": (lambda: byte_tokenizer(BYTES), "splits text by ByteLevel False"),
    "prefixed": (lambda: byte_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=True)), "splits text by ByteLevel,"),
    "merges ignored": (lambda: byte_tokenizer(ignore_merges=True), "no known name in llama.cpp"),
    "words": (lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))), "WordLevel"),
    "few bytes": (lambda: make_piece_tokenizer(metaspace=False), "no token <0x00>; expected Llama 2's bytes"),
}


@pytest.mark.parametrize("name", REFUSED_TOKENIZERS)
def test_tokenizers_without_a_name_are_refused(name: str) -> None:
    made_tokenizer, message = REFUSED_TOKENIZERS[name]
    with pytest.raises(ConfigError, match=message):
        tokenizer_metadata(made_tokenizer(), 400)


def test_another_normalizer_of_pieces_is_refused() -> None:
    tokenizer = make_piece_tokenizer(metaspace=False, fallback=bytes(range(256)))
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "_")])
    with pytest.raises(ConfigError, match="pieces that are not sentencepiece's; expected Llama 2's bytes, normalizer"):
        tokenizer_metadata(tokenizer, 400)
    with pytest.raises(ConfigError, match="a token with id 262; expected ids below 200"):
        tokenizer_metadata(byte_tokenizer(), 200)


REFUSED_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "architecture": ("gpt2", {"n_embd": HIDDEN, "n_head": 4, "n_layer": 1}, "model_type='gpt2'; expected one of llama"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'; expected silu"),
    "window": ("mistral", {"sliding_window": 16}, "sliding_window=16; expected full attention"),
    "heads": ("qwen2", {"head_dim": 16}, "4 heads of size 16; expected heads that fill hidden_size=32"),
    "positions": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "'dynamic'",
    ),
}
LONG = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 32}
REFUSED_MODELS["llama3 in qwen"] = ("qwen3", {"rope_parameters": LONG}, "'llama3'; expected one of default, linear,")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}
REFUSED_MODELS["yarn"] = ("llama", {"rope_parameters": YARN}, "beta_fast=16; expected 32 in llama.cpp's layers")


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_draft_models_that_llama_cpp_lacks_are_refused(name: str, tmp_path: Path, target: LlamaForCausalLM) -> None:
    kind, changes, message = REFUSED_MODELS[name]
    drafter = draft_model(target, kind, **changes)
    with pytest.raises(ConfigError, match=message):
        written(drafter, target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_a_tokenizer_a_close_vocabulary_or_the_package(
    tmp_path: Path, target: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = draft_model(target, "llama")
    with pytest.raises(ConfigError, match="no tokenizer; expected the target's"):
        exported(drafter, target, "gguf", tmp_path / "out")
    drafter.vocab_size = 429
    with pytest.raises(ConfigError, match="a vocabulary of 429 beside the target's 300; expected at most 128 apart"):
        written(drafter, target, tmp_path / "out")
    drafter.vocab_size = VOCAB
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"needs the package gguf; expected: pip install '\.\[gguf\]'"):
        written(drafter, target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
