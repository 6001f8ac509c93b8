"""Medusa heads in vLLM's layout and in the original one."""

import re
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.heads.formats.common import Serving, Source, on_vllm
from draftsmith.heads.formats.published import POSITIVE, Published
from draftsmith.heads.medusa import Medusa

# Shapes: H hidden size, V target vocabulary, D draft vocabulary.


def read_medusa(published: Published) -> Medusa:
    """Read vLLM's layout, or the original one where no tensor is named `blocks.*`."""
    config, H, V = published.config, published.text.hidden_size, published.text.vocab_size
    tensors = {name.removeprefix("medusa_heads."): value for name, value in published.tensors.items()}
    published.tensors = tensors
    published.allow("hidden_size", config.get("hidden_size", H), (H,))
    published.allow("vocab_size", config.get("vocab_size", V), (V,))
    heads = published.allow("num_heads", config.get("medusa_num_heads", config.get("num_heads")), POSITIVE)
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    layers = published.allow("num_hidden_layers", layers, POSITIVE)
    D = published.allow("truncated_vocab_size", config.get("truncated_vocab_size") or V, range(1, V + 1))
    shared = bool(config.get("original_lm_head"))
    drafter = Medusa(H, V, heads, layers, shared, D if D < V else None)
    if not any(name.startswith("blocks.") for name in tensors):
        own = re.compile(r"^lm_heads\.(\d+)\.")
        published.fill(drafter, lambda name: own.sub(rf"\1.{layers}.", name.removeprefix("blocks.")))
        return drafter
    biases = [f"blocks.{head}.layers.{layer}.bias" for head in range(heads) for layer in range(layers)]
    if any(name in tensors for name in biases):
        published.allow("medusa_fc_bias", config.get("medusa_fc_bias", True), (True,))
    elif not config.get("medusa_fc_bias"):
        tensors |= dict.fromkeys(biases, torch.zeros(H))
    if D < V:  # token_map [D], the token of each row, becomes offsets and a mask
        map_D = published.take("token_map", f"int [{D}]").long()
        if len(map_D.unique()) < D or map_D.min() < 0 or map_D.max() >= V:
            raise published.refusal("tensor token_map has repeated or unknown tokens", f"distinct ids below {V}")
        for name in [name for name, value in tensors.items() if name.startswith("lm_heads.") and len(value) == V]:
            tensors[name] = tensors[name][map_D]
        tensors["lm_heads.vocabulary.d2t"] = map_D - torch.arange(D)
        tensors["lm_heads.vocabulary.t2d"] = torch.isin(torch.arange(V), map_D)
    own = re.compile(r"^(blocks\.\d+)\.(\d+)\.linear\.")
    published.fill(drafter, lambda name: own.sub(r"\1.layers.\2.", name))
    published.sort_rows(drafter.draft_vocabulary, [drafter.lm_heads[k] for k in range(1 if shared else heads)])
    return drafter


def write_medusa_for_vllm(source: Source[Medusa]) -> Serving:
    """Write vLLM's layout; the draft vocabulary is `token_map`, the token of each row."""
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
    }
    source.write(config, tensors)
    notes = [
        "vLLM 0.32 serves Medusa heads; 0.33 no longer does.",
        "`medusa_fc_bias` is written as true: without the key vLLM drops the biases.",
    ]
    if vocabulary is not None:
        notes.append("`token_map` is the token of each row, not an offset as EAGLE-3's `d2t`.")
    return on_vllm(replace(source, draft_length=drafter.num_heads), "medusa", notes)
