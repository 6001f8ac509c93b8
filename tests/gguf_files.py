"""Tiny targets as GGUF files, quantized as llama.cpp does it."""

from pathlib import Path
from typing import Any

import torch
from conftest import make_llama
from parity.test_gguf import byte_tokenizer
from transformers import LlamaForCausalLM

from draftsmith.heads import DraftModel
from draftsmith.hub.export import export_drafter

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32}
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<|eos|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def tiny_llama() -> LlamaForCausalLM:
    """Return a random Llama whose rows have whole blocks of every quantized type."""
    return make_llama(**SIZES).requires_grad_(False)


def write_gguf(
    file: Path, model: LlamaForCausalLM, quantization: str | None = None, without: str | None = None
) -> Path:
    """Write `model` with a byte-level tokenizer and a chat template.

    Args:
        quantization: type of ggml for the matrices.
        without: name of a tensor that is left out; needs `quantization`.
    """
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    file.parent.mkdir(parents=True, exist_ok=True)
    out = file.parent / f"{file.stem}-plain"
    options: dict[str, Any] = {"target_name": "org/target", "tokenizer": tokenizer, "dtype": "float32"}
    written = export_drafter(DraftModel(model), model, "gguf", out, **options).folder / "drafter.gguf"
    if quantization is None:
        return written.rename(file)
    _requantize(written, file, quantization, without)
    return file


def _requantize(source: Path, file: Path, quantization: str, without: str | None) -> None:
    import gguf

    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[quantization]
    writer = gguf.GGUFWriter(str(file), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            item = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=item)
    for part in reader.tensors:
        if part.name == without:
            continue
        values = torch.from_numpy(part.data.copy()).view(torch.float32).reshape(part.shape.tolist()[::-1]).numpy()
        if values.ndim == 1:
            writer.add_tensor(part.name, values)
        else:
            writer.add_tensor(part.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
