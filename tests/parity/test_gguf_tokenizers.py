"""Tokenizers of GGUF targets: the tokens that llama.cpp makes, where transformers' reader leaves something out.

Expected values are llama.cpp's (src/llama-vocab.cpp) and those of the models' own tokenizers; test_llama_cpp.py
compares all names with the engine.
"""

from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import pre_tokenizers

from draftsmith.distill.load_target import load_tokenizer
from draftsmith.errors import ConfigError

gguf = pytest.importorskip("gguf")
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = {
    "tokens": ["<|begin_of_text|>", "<|eot_id|>", *LETTERS, "ab", "merkez", "12", "34", "123", "1234"],
    "merges": ["a b", "1 2", "3 4", "12 3", "12 34"],
}
PIECES = ["\u2581", "o", "n", "c", "e", "on", "ce", "once", "\u2581once"]
SENTENCEPIECE = {
    "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES],
    "scores": [0.0] * 259 + [-9.0] * 5 + [-3.0, -3.0, -2.0, -1.0],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
}


def write_tokenizer(file: Path, model: str, pre: str | None, **keys: Any) -> Path:
    """Write a file with a tokenizer and, so that it can be read, the embedding of a Llama."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(keys["tokens"]))
    first = 0 if model == "gpt2" else 1
    given = {"token_type": [3, 3] + [1] * (len(keys["tokens"]) - 2), "bos_token_id": first, "eos_token_id": first + 1}
    for name, value in (given | {"model": model, "pre": pre} | keys).items():
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif value is not None:
            writer.add_string(f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", numpy.zeros((len(keys["tokens"]), 8), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tokens_of(file: Path, text: str) -> list[str]:
    tokenizer = load_tokenizer(str(file))[0]
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "said", "first"),
    [
        *(("llama-bpe", said, said is not False) for said in (None, True, False)),
        ("falcon3", None, True),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
        (None, None, False),
    ],
)
def test_bos_where_the_file_or_the_family_has_it(
    pre: str | None, said: bool | None, first: bool, tmp_path: Path
) -> None:
    file = write_tokenizer(tmp_path / "t.gguf", "gpt2", pre, add_bos_token=said, **BYTE_LEVEL)
    assert tokens_of(file, "ab") == ["<|begin_of_text|>"] * first + ["ab"]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_words_that_no_merge_reaches(pre: str, whole: bool, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "t.gguf", "gpt2", pre, add_bos_token=False, **BYTE_LEVEL)
    assert tokens_of(file, "merkez") == (["merkez"] if whole else list("merkez"))


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "1234", "5"]),
        ("smollm", list("1234") + list("12345")),
        ("llama-bpe", ["123", "4", "123", "4", "5"]),
        ("qwen2", list("1234") + list("12345")),
        ("gpt-4o", ["123", "4", "123", "4", "5"]),
    ],
)
def test_numbers_are_split_as_the_name_says(pre: str, expected: list[str], tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "t.gguf", "gpt2", pre, add_bos_token=False, **BYTE_LEVEL)
    found = [token for token in tokens_of(file, "1234-12345") if token != "-"]
    assert found == expected


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_space_before_pieces(prefix: bool | None, tmp_path: Path) -> None:
    keys = {"add_bos_token": False, "add_space_prefix": prefix, **SENTENCEPIECE}
    file = write_tokenizer(tmp_path / "t.gguf", "llama", "default", **keys)
    assert tokens_of(file, "once") == ["once" if prefix is False else "\u2581once"]
    tokenizer = load_tokenizer(str(file))[0]
    assert tokenizer.decode(tokenizer("once once")["input_ids"]) == "once once"


def test_an_unknown_splitting_is_refused_by_name(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "t.gguf", "gpt2", "klingon", **BYTE_LEVEL)
    with pytest.raises(ConfigError, match=r"\.pre=klingon, an unknown splitting of text; expected one of gpt-2"):
        load_tokenizer(str(file))
