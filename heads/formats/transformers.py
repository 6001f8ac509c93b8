"""Independent draft models: plain transformers folders, which every engine reads.

Any head inside stock transformers: a draftsmith checkpoint with `custom_generate/generate.py`.
"""

import json
from importlib.resources import files
from pathlib import Path

from draftsmith.heads.checkpoint import save_drafter
from draftsmith.heads.formats.common import SGLANG, VLLM, Serving, Source, name_of, sglang_command, vllm_command
from draftsmith.heads.lora import merged_state
from draftsmith.storage import write_json, write_text

CODE = "custom_generate"
"""The folder that transformers looks for."""


def write_custom_generate(source: Source) -> Serving:
    """The checkpoint as it is, and the file that transformers runs where the user trusts it."""
    drafter, before = source.drafter, next(source.drafter.parameters()).dtype
    exact = {name: value.clone() for name, value in drafter.state_dict().items()}  # which a narrower dtype rounds
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
        "`custom_generate/generate.py` is run by transformers: read it, it is short. It needs the package draftsmith.",
        "It also takes `draft_length`, `policy`, `rule` and `drafter`: the folder or repository where it cannot tell.",
    ]
    return Serving("transformers", usage, "python", notes)


def write_generate(folder: Path) -> None:
    """The file that transformers runs, into a checkpoint that is already there."""
    text = files("draftsmith.hub").joinpath("generate.py.txt").read_text(encoding="utf-8")
    (folder / CODE).mkdir(exist_ok=True)
    write_text(folder / CODE / "generate.py", text)
    write_text(folder / CODE / "requirements.txt", "draftsmith>=0.1.0\n")


def write_for_transformers(source: Source) -> Serving:
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


def write_for_vllm(source: Source) -> Serving:
    _require_one_vocabulary(source)
    _write(source)
    return Serving("vLLM", vllm_command(source.target_name, VLLM["draft_model"], "{folder}", source.draft_length))


def write_for_sglang(source: Source) -> Serving:
    _require_one_vocabulary(source)
    _write(source)
    return Serving("SGLang", sglang_usage(source))


def sglang_usage(source: Source) -> str:
    algorithm, dtype = SGLANG[source.drafter.type], name_of(source.dtype)
    return sglang_command(source.target_name, algorithm, "{folder}", source.draft_length, dtype)


def _require_one_vocabulary(source: Source) -> None:
    source.require(not source.target.config.is_encoder_decoder, "an encoder-decoder model", "format=transformers")
    sizes = source.drafter.vocab_size, source.text.vocab_size
    found = f"a vocabulary of {sizes[0]} beside the target's {sizes[1]}"
    source.require(sizes[0] == sizes[1], found, "the same size, or format=transformers")


def _write(source: Source) -> None:
    model = source.drafter.model
    state = {name: source.stored(value) for name, value in merged_state(model).items()}
    for name in model.all_tied_weights_keys:
        state.pop(name, None)
    model.save_pretrained(source.folder, state_dict=state)
    file = source.folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("draftsmith", None)  # which a config that was read from a checkpoint keeps
    write_json(file, {**config, "dtype": name_of(source.dtype)})
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(source.folder)
