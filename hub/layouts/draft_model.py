"""Independent draft models: plain transformers folders, which every engine reads."""

import json

from draftsmith.heads.lora import merged_state
from draftsmith.hub.engines import SGLANG, VLLM, sglang_command, vllm_command
from draftsmith.hub.layouts.layout import Serving, Source, name_of
from draftsmith.storage import write_json


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
