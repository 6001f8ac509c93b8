"""Tokenizers in GGUF files: the metadata of a tokenizer, and what transformers' reader of that metadata leaves out.

A file names the splitting before the merges; what a name means is in llama.cpp's source (src/llama-vocab.cpp,
0c1e57098) and in the tokenizer.json of the models that it was made for.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.errors import ConfigError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
SPACE = "\u2581"
PREFIX = "tokenizer.ggml."


class Splitting(NamedTuple):
    """How a byte-level tokenizer splits text before its merges."""

    steps: tuple[str, ...]
    """As `_steps` describes them."""
    ignore_merges: bool = False
    """A word that is a token is that token, also where no merges lead to it."""
    add_bos: bool = False
    """BOS is the first token where the file does not say."""


BYTES = "ByteLevel False"
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
REST = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}"
WORDS = r"Split 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SENTENCES = r"Split  ?[^(\s|.,!?…。，、।۔،)]+"
CHINESE = r"Split [\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cased(end: str, digits: str) -> str:
    """Return the splitting of words before capital letters; `end` ends a word, `digits` are those of a number."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{end}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    return rf"Split {words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}"


GPT2 = Splitting(("ByteLevel True",))
DIGITS = Splitting(("Digits True", "ByteLevel True"))
LLAMA3 = Splitting((rf"Split {LETTERS}\p{{N}}{{1,3}}{REST}", BYTES), ignore_merges=True, add_bos=True)
QWEN2 = Splitting((rf"Split {LETTERS}\p{{N}}{REST}", BYTES))
MARKED = QWEN2.steps[0].replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"^\s\p{L}", r"^\s\p{L}\p{M}")
QWEN35 = Splitting((MARKED, BYTES))
GPT4O = Splitting((_cased(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}"), BYTES))
DEEPSEEK3 = Splitting(
    (
        r"Split \p{N}{1,3}",
        r"Split [\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""Split [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
        BYTES,
    )
)
SPLITTINGS: dict[str, Splitting] = {
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4", "gigachat", "a.x-4.0", "mellum", "olmo", "mpt", "jais"), GPT2),
    **dict.fromkeys(("trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    "mellum2": DIGITS,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    "glm4": LLAMA3._replace(add_bos=False),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splitting(LLAMA3.steps)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open"), QWEN2),
    **dict.fromkeys(("grok-2", "f2llmv2"), QWEN2),
    "qwen35": QWEN35,
    "tekken": Splitting((_cased("", r"\p{N}"), BYTES), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "deepseek-llm": Splitting(
        (
            r"Split [\r\n]",
            r"Split \s?[\p{Lu}\p{Ll}\p{Lt}&&[^\u10d0-\u10ff]]+",
            r"Split \s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"Split \s+$",
            CHINESE,
            r"Split \p{N}+",
            BYTES,
        )
    ),
    "deepseek-coder": Splitting(
        (r"Split [\r\n]", r"Split \s?\p{L}+", r"Split \s?\p{P}+", CHINESE, "Digits True", BYTES)
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK3),
    "falcon": Splitting((r"Split [\p{P}$+<=>^~|`]+", WORDS, "Split [0-9][0-9][0-9]", BYTES)),
    "default": Splitting((r"Split [\p{P}$+<=>^~|]+", WORDS, r"Split \p{N}+", "Split [0-9][0-9][0-9]", BYTES)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Splitting((SENTENCES, BYTES))),
    "viking": Splitting((SENTENCES, "Digits True", BYTES)),
    "seed-coder": Splitting((rf"Split {LETTERS}\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{END}", BYTES)),
    "minicpm5": Splitting((r"Split \p{N}{1,3}", rf"Split {LETTERS}\p{{N}}+{REST}", BYTES), ignore_merges=True),
}
"""By llama.cpp's name. Left out are names of architectures that transformers does not read from GGUF files."""


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
    steps, ignores = _steps(stored["pre_tokenizer"]), bool(stored["model"].get("ignore_merges"))
    names = (name for name, known in SPLITTINGS.items() if (known.steps, known.ignore_merges) == (steps, ignores))
    name = next(names, None)
    if name is None:
        raise ConfigError(
            f"format=gguf: the tokenizer splits text by {' + '.join(steps) or 'nothing'}"
            f"{' and ignores merges' * ignores}, which has no known name in llama.cpp; expected the splitting of "
            f"{', '.join(SPLITTINGS)}"
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


def adds_bos(file: Mapping[str, Any]) -> bool:
    """Return whether BOS is the first token of a text, given the metadata of a GGUF file.

    Raises:
        ConfigError: for a splitting that is not in `SPLITTINGS`.
    """
    by_default = _splitting(file).add_bos if file.get(f"{PREFIX}model") == "gpt2" else True
    return bool(file.get(f"{PREFIX}add_bos_token", by_default))


def complete(stored: dict[str, Any], file: Mapping[str, Any]) -> None:
    """Write into a tokenizer.json, as transformers makes it of a GGUF file with this metadata, what llama.cpp reads."""
    kind, architecture = file.get(f"{PREFIX}model"), str(file.get("general.architecture"))
    if kind == "gpt2":
        splitting = _splitting(file)
        stored["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [_step(step) for step in splitting.steps]}
        stored["model"]["ignore_merges"] = splitting.ignore_merges
    elif kind == "llama" and not architecture.startswith("gemma"):  # transformers reads Gemma's as it is
        stored["pre_tokenizer"] = None
        replaced, prefixed = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}, []
        decoders = [step for step in stored["decoder"]["decoders"] if step["type"] != "Strip"]
        if file.get(f"{PREFIX}add_space_prefix", True):
            prefixed = [{"type": "Prepend", "prepend": SPACE}]
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        stored["normalizer"] = {"type": "Sequence", "normalizers": [*prefixed, replaced]}
        stored["decoder"]["decoders"] = decoders
        if "phi-3" in str(file.get("general.name")).lower().replace("phi3", "phi-3"):
            for token in stored["added_tokens"]:
                token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")


def _splitting(file: Mapping[str, Any]) -> Splitting:
    name = file.get(f"{PREFIX}pre") or "default"
    if name not in SPLITTINGS:
        raise ConfigError(f"{PREFIX}pre={name}, an unknown splitting of text; expected one of {', '.join(SPLITTINGS)}")
    return SPLITTINGS[name]


def _step(described: str) -> dict[str, Any]:
    """Return the splitting step that `_steps` describes so."""
    kind, value = described.split(" ", 1)
    if kind == "Split":
        return {"type": "Split", "pattern": {"Regex": value}, "behavior": "Isolated", "invert": False}
    if kind == "Digits":
        return {"type": "Digits", "individual_digits": value == "True"}
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": value == "True"}
