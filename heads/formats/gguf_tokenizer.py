"""A tokenizer as metadata of a GGUF file.

llama.cpp knows the splitting of text before the merges by name only. Sources: conversion/base.py and
src/llama-vocab.cpp in github.com/ggml-org/llama.cpp (0c1e57098).
"""

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: dict[tuple[str, ...], str] = {
    ("ByteLevel True",): "gpt-2",
    ("Digits True", "ByteLevel True"): "smollm",
    (f"Split {LETTERS}\\p{{N}}{{1,3}}{REST}", "ByteLevel False"): "llama-bpe",
    (f"Split {LETTERS}\\p{{N}}{REST}", "ByteLevel False"): "qwen2",
}
"""llama.cpp's name of each sequence of splitting steps, as `_steps` describes it."""
SPACE = "\u2581"
PREFIX = "tokenizer.ggml."


def tokenizer_metadata(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer whose ids are padded to `vocab_size`.

    Raises:
        ConfigError: for a tokenizer that llama.cpp has no name for.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"format=gguf: tokenizer {type(tokenizer).__name__}; expected one with a tokenizer.json")
    stored = json.loads(backend.to_str())
    model, ids = stored["model"], tokenizer.get_vocab()
    if max(ids.values()) >= vocab_size:
        raise ConfigError(f"format=gguf: a token with id {max(ids.values())}; expected ids below {vocab_size}")
    if model["type"] != "BPE":
        raise ConfigError(f"format=gguf: tokenizer of type {model['type']}; expected BPE")
    added = {token["content"]: token for token in stored["added_tokens"]}
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, index in ids.items():
        tokens[index], types[index] = text, _type(text, added.get(text))
    if model["byte_fallback"]:
        own = _pieces(stored, tokens, types)
    else:
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        own = {"model": "gpt2", "pre": _split_name(stored), "merges": merges}
    special = {key: getattr(tokenizer, f"{key}_token_id") for key in ("bos", "eos", "unk", "pad")}
    own |= {f"{key.replace('unk', 'unknown').replace('pad', 'padding')}_token_id": special[key] for key in special}
    first = tokenizer("a")["input_ids"][:1]
    own |= {"tokens": tokens, "token_type": types, "add_bos_token": first == [special["bos"]]}
    metadata = {f"{PREFIX}{key}": value for key, value in own.items() if value is not None and value != []}
    template = getattr(tokenizer, "chat_template", None)
    return metadata | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def _type(text: str, added: dict[str, Any] | None) -> int:
    """Return the type of a token of the vocabulary, given its entry among the added tokens."""
    if added is not None:
        special = added["special"] or re.fullmatch(r"<\|.*\|>", text)  # as the converter has it
        return CONTROL if special else USER_DEFINED
    return NORMAL


def _split_name(stored: dict[str, Any]) -> str:
    """Return llama.cpp's name for the splitting before the merges of a byte-level tokenizer."""
    steps = _steps(stored["pre_tokenizer"])
    name = SPLITS.get(steps)
    if name is None or bool(stored["model"].get("ignore_merges")) != (name == "llama-bpe"):
        raise ConfigError(
            f"format=gguf: the tokenizer splits text by {' + '.join(steps) or 'nothing'}, which has no known name in "
            f"llama.cpp; expected the splitting of {', '.join(SPLITS.values())}"
        )
    return name


def _steps(part: dict[str, Any] | None) -> tuple[str, ...]:
    """Return a description of each splitting step."""
    if part is None:
        return ()
    if part["type"] == "Sequence":
        return tuple(step for each in part["pretokenizers"] for step in _steps(each))
    if part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"] and "Regex" in part["pattern"]:
        return (f"Split {part['pattern']['Regex']}",)
    if part["type"] == "ByteLevel" and not part["add_prefix_space"]:
        return (f"ByteLevel {part.get('use_regex', True)}",)
    return (f"Digits {part['individual_digits']}",) if part["type"] == "Digits" else (part["type"],)


def _pieces(stored: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return the metadata of pieces with byte fallback, as sentencepiece makes them; set the types of bytes.

    llama.cpp merges the pair with the highest score first, so the score of a piece is minus the rank of its merge.
    """
    model, unknown = stored["model"], stored["model"]["unk_token"]
    ranks = {
        "".join(pair.split(" ", 1) if isinstance(pair, str) else pair): -i for i, pair in enumerate(model["merges"])
    }
    for index, text in enumerate(tokens):
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            types[index] = BYTE
        elif text == unknown:
            types[index] = UNKNOWN
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in model["vocab"]]
    prefixes = _prefixes_a_space(stored)
    if missing or prefixes is None:
        problem = f"no token {missing[0]}" if missing else "pieces that are not sentencepiece's"
        raise ConfigError(f"format=gguf: a tokenizer with {problem}; expected Llama 2's bytes, normalizer and spaces")
    scores = [float(ranks.get(text, 0)) for text in tokens]
    return {"model": "llama", "scores": scores, "add_space_prefix": prefixes}


def _prefixes_a_space(stored: dict[str, Any]) -> bool | None:
    """Return whether a space is put before a text; None for another normalizer than Llama 2's."""
    normalizer, split = stored["normalizer"] or {}, stored["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if not split and steps and steps[-1] == replaced and steps[:-1] in ([], [{"type": "Prepend", "prepend": SPACE}]):
        return len(steps) == 2
    if not steps and split.get("type") == "Metaspace" and split.get("replacement") == SPACE and not split.get("split"):
        return split.get("prepend_scheme") != "never"
    return None
