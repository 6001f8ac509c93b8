"""Exports for transformers: draft models as plain folders, which every engine reads, and other drafters with code.

Other drafters are draftsmith checkpoints with `custom_generate/generate.py`, which transformers' `generate` runs.
"""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import draftsmith
from draftsmith.heads.checkpoint import save_drafter
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.formats.common import Serving, Source, on_sglang, on_vllm
from draftsmith.heads.lora import merged_state
from draftsmith.storage import write_text

CODE = "custom_generate"
"""Name of the folder that transformers runs code from."""


def write_custom_generate(source: Source[Any]) -> Serving:
    """Write the checkpoint and the file that transformers runs with `trust_remote_code=True`."""
    drafter, before = source.drafter, next(source.drafter.parameters()).dtype
    exact = {name: value.clone() for name, value in drafter.state_dict().items()}  # a narrower dtype rounds them
    try:
        save_drafter(
            drafter.to(source.dtype),
            source.folder,
            target=source.checkpoint,
            recipe=None,
            draft_length=source.draft_length,
            tokenizer=source.tokenizer,
        )
    finally:
        drafter.to(before).load_state_dict(exact)
    write_generate(source.folder)
    usage = (
        "from transformers import AutoModelForCausalLM\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{source.target_name}")\n'
        'target.generate(**inputs, custom_generate="{folder}", trust_remote_code=True)'
    )
    notes = [
        "transformers runs `custom_generate/generate.py`: read it before trusting it. It needs draftsmith, installed "
        "from a clone of its repository.",
        "It also takes `draft_length`, `policy`, `rule` and `drafter`: its folder or repository if unknown.",
    ]
    return Serving("transformers", usage, "python", notes)


def write_generate(folder: Path) -> None:
    """Write the code that transformers runs into the folder of a checkpoint."""
    text = files("draftsmith.hub").joinpath("generate.py.txt").read_text(encoding="utf-8")
    (folder / CODE).mkdir(exist_ok=True)
    write_text(folder / CODE / "generate.py", text.replace("VERSION", draftsmith.__version__))


def write_for_transformers(source: Source[DraftModel]) -> Serving:
    """Write a draft model for transformers' assisted generation."""
    _write(source)
    auto = "AutoModelForSeq2SeqLM" if source.target.config.is_encoder_decoder else "AutoModelForCausalLM"
    usage = (
        f"from transformers import {auto}\n\n"
        f'target = {auto}.from_pretrained("{source.target_name}")\n'
        f'assistant = {auto}.from_pretrained("{{folder}}")\n'
        f"assistant.generation_config.num_assistant_tokens = {source.draft_length}\n"
        "target.generate(**inputs, assistant_model=assistant)"
    )
    return Serving("transformers", usage, "python")


def write_for_vllm(source: Source[DraftModel]) -> Serving:
    """Write a draft model for vLLM."""
    _require_one_vocabulary(source)
    _write(source)
    return on_vllm(source, "draft_model", [])


def write_for_sglang(source: Source[DraftModel]) -> Serving:
    """Write a draft model for SGLang."""
    _require_one_vocabulary(source)
    _write(source)
    return on_sglang(source, [])


def _require_one_vocabulary(source: Source[DraftModel]) -> None:
    """Raise ConfigError for encoder-decoder models and for a vocabulary of another size than the target's."""
    source.require(not source.target.config.is_encoder_decoder, "an encoder-decoder model", "format=transformers")
    sizes = source.drafter.vocab_size, source.text.vocab_size
    value = f"a vocabulary of {sizes[0]} beside the target's {sizes[1]}"
    source.require(sizes[0] == sizes[1], value, "the same size, or format=transformers")


def _write(source: Source[DraftModel]) -> None:
    """Write the model and the tokenizer as a plain transformers folder."""
    model = source.drafter.model
    state = {name: source.stored(value) for name, value in merged_state(model).items()}
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    model.save_pretrained(source.folder, state_dict=state)
    config = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    config.pop("draftsmith", None)  # kept by a config that was read from a checkpoint
    source.write_config(config)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(source.folder)
