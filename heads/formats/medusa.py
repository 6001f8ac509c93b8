"""Medusa heads: the layout that vLLM reads, and the original one (FasterDecoding/Medusa)."""

import re

from torch import Tensor

from draftsmith.heads.formats.common import VLLM, Serving, Source, name_of, vllm_command

ORIGINAL_WEIGHTS = "medusa_lm_head.safetensors"


def write_medusa_for_vllm(source: Source) -> Serving:
    """`blocks.k.layers.j.*` and `lm_heads.k.weight`; a draft vocabulary as `token_map`, the token of each row."""
    drafter, vocabulary = source.drafter, source.drafter.draft_vocabulary
    tensors: dict[str, Tensor] = {}
    for name, value in source.weights(drafter).items():
        if ".vocabulary." not in name:
            tensors[re.sub(r"^(blocks\.\d+)\.(\d+)\.linear\.", r"\1.layers.\2.", name)] = value
    if vocabulary is not None:
        tensors["token_map"] = source.stored(vocabulary.tokens_D)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "truncated_vocab_size": drafter.vocab_size if vocabulary is None else len(vocabulary),
        "num_heads": drafter.num_heads,
        "num_hidden_layers": drafter.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.shared_lm_head,
        "dtype": name_of(source.dtype),
    }
    source.write(config, tensors)
    notes = ["`medusa_fc_bias` is written as true: vLLM takes it for false where it is missing, and drops the biases."]
    if vocabulary is not None:
        notes.append("`token_map` is the token of each row itself, not an offset as EAGLE-3's `d2t`.")
    return Serving("vLLM", vllm_command(source.target_name, VLLM["medusa"], "{folder}", drafter.num_heads), notes=notes)


def write_medusa(source: Source) -> Serving:
    """`k.j.linear.*` and, behind the last block of head k, `k.layers.weight`: an lm_head for each head."""
    drafter = source.drafter
    source.require(drafter.draft_vocabulary is None, "a draft vocabulary", "format=vllm or transformers")
    tensors = {name.removeprefix("blocks."): value for name, value in source.weights(drafter.blocks).items()}
    for k in range(drafter.num_heads):
        tensors[f"{k}.{drafter.num_layers}.weight"] = source.stored(drafter.lm_heads[k].weight)
    config = {
        "medusa_num_heads": drafter.num_heads,
        "medusa_num_layers": drafter.num_layers,
        "base_model_name_or_path": source.target_name,
        "hidden_size": drafter.hidden_size,
        "vocab_size": drafter.vocab_size,
        "dtype": name_of(source.dtype),
    }
    source.write(config, tensors, ORIGINAL_WEIGHTS)
    usage = (
        "import torch\n"
        "from medusa.model.medusa_model import MedusaModel\n"
        "from safetensors.torch import load_file\n\n"
        "# The repository reads medusa_lm_head.pt, a pickle: made here from the safetensors, once.\n"
        f'torch.save(load_file("{{folder}}/{ORIGINAL_WEIGHTS}"), "{{folder}}/medusa_lm_head.pt")\n'
        f'model = MedusaModel.from_pretrained("{{folder}}", torch_dtype=torch.{name_of(source.dtype)})'
    )
    notes = ["No pickle is written: the original repository's file is made by the line above."]
    if drafter.num_layers > 1:
        notes.append(
            "The original code repeats one block in a head where there are several layers, and trains it once."
        )
    if drafter.shared_lm_head:
        notes.append("The one lm_head of all heads is written once for each.")
    return Serving("the Medusa repository", usage, "python", notes)
