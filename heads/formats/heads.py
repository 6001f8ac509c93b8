"""Medusa heads in vLLM's layout and in the original one, Hydra heads of their repository, IBM's MLP speculators.

    ours                          Hydra, `mlp`                  Hydra++, `prefix-mlp`              MLP speculator
    heads.k.mix                   hydra_mlp.k.0.linear          hydra_mlp.k.1.linear
    heads.k.residual              hydra_mlp.k.0.res_connection  hydra_mlp.k.1.res_connection
    heads.k.blocks.0.linear       hydra_mlp.k.{1,2,…}.linear    hydra_mlp.k.{3,5,…}.linear
    prefix.{layer,norm}                                         prefix_embeding_layer.{layers.0,norm}
    steps.k.{embedding,norm}                                                                       {emb,ln}.k
    steps.k.projection                                                                             proj.k
    lm_heads.k                    hydra_lm_head.k               hydra_lm_head.k.1                  head.k

The residual blocks of a Hydra head are one module, stored once for each time it is applied. With tied weights an MLP
speculator has one step, stored n times or once, whose projection is proj.1; proj.0 projects the target's state.
Sources: hydra/model at 3f39fbd, fms_extras/models/speculator.py at 16339f7.
"""

import re
from dataclasses import replace

import torch
from torch import Tensor

from draftsmith.heads.formats.common import Serving, Source, on_vllm
from draftsmith.heads.formats.published import POSITIVE, Published
from draftsmith.heads.hydra import Hydra
from draftsmith.heads.layers import layer_config
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.mlp_speculator import MlpSpeculator
from draftsmith.heads.untrusted import LONGEST_DRAFT

# Shapes: H hidden size, V target vocabulary, D draft vocabulary.

BOTH = (False, True)
ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
"""Values of `hydra_head_arch`, and whether the heads read a prefix layer."""
EMBEDDINGS = "input_embed_fn.weight"
"""The target's embeddings, which the class there stores as a part of itself."""
UNUSED = "prefix_embeding_layer.embed_tokens.weight"
"""Embeddings of the prefix layer, which reads states."""


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


def read_hydra(published: Published) -> Hydra:
    """Read the heads of the authors' repository; a key that is missing has the value of their `HydraConfig`."""
    config, H, V = published.config, published.text.hidden_size, published.text.vocab_size
    published.allow("grounded_heads", config.get("grounded_heads", False), (True,))
    published.allow("hidden_state_offset", config.get("hidden_state_offset", 0), (0,))
    named = published.allow("hydra_head_arch", config.get("hydra_head_arch", "mlp"), tuple(ARCHITECTURES))
    heads = published.allow("hydra_num_heads", config.get("hydra_num_heads", 4), POSITIVE)
    most = len(published.tensors)  # each layer of a head is stored
    layers = published.allow("hydra_num_layers", config.get("hydra_num_layers", 1), range(1, most + 1))
    has_prefix = ARCHITECTURES[named]
    body = layer_config(published.target, 1, hidden_act=published.text.hidden_act) if has_prefix else None
    drafter = Hydra(H, H, V, heads, layers, original=True, prefix=body)
    published.tensors.pop(UNUSED, None)
    published.drop_shared(EMBEDDINGS, published.target.get_input_embeddings())
    for k in range(heads):
        for part in ("weight", "bias"):
            _drop_copies(published, [_block(k, place, part, has_prefix) for place in range(1, layers)])
    published.fill(drafter, lambda name: _of_hydra(name, has_prefix))
    return drafter


def _block(head: int, place: int, part: str, dropout: bool) -> str:
    """Return the name of a tensor of a head's block; before each one the prefix heads have a dropout."""
    return f"hydra_mlp.{head}.{2 * place + 1 if dropout else place}.linear.{part}"


def _of_hydra(name: str, dropout: bool) -> str:
    """Return the name in Hydra's layout of one of our tensors."""
    first = 1 if dropout else 0
    name = name.replace("prefix.layer.", "prefix_embeding_layer.layers.0.")
    name = name.replace("prefix.norm.", "prefix_embeding_layer.norm.")
    name = re.sub(r"^heads\.(\d+)\.mix\.", rf"hydra_mlp.\1.{first}.linear.", name)
    name = re.sub(r"^heads\.(\d+)\.residual\.", rf"hydra_mlp.\1.{first}.res_connection.", name)
    name = re.sub(r"^heads\.(\d+)\.blocks\.0\.linear\.", rf"hydra_mlp.\1.{2 * first + 1}.linear.", name)
    return re.sub(r"^lm_heads\.(\d+)\.", r"hydra_lm_head.\1.1." if dropout else r"hydra_lm_head.\1.", name)


def _drop_copies(published: Published, names: list[str]) -> None:
    """Skip the tensors that equal the first one of these names; raise ConfigError if one differs."""
    for name in names[1:]:
        first, copy = published.tensors.get(names[0]), published.tensors.pop(name, None)
        if first is not None and copy is not None and not torch.equal(first, copy):
            raise published.refusal(f"tensor {name} differs from {names[0]}", "one tensor: these weights are shared")


def read_fms(published: Published) -> MlpSpeculator:
    """Read an MLP speculator; a key that is missing has the value of IBM's `MLPSpeculatorConfig`."""
    config, H, V = published.config, published.text.hidden_size, published.text.vocab_size
    published.allow("emb_dim", config.get("emb_dim", 4096), (H,))
    published.allow("vocab_size", config.get("vocab_size", 32000), (V,))
    tied = published.allow("tie_weights", config.get("tie_weights", False), BOTH)
    scaled = published.allow("scale_input", config.get("scale_input", False), BOTH)
    inner = published.allow("inner_dim", config.get("inner_dim", 0) or H, POSITIVE)
    allowed = range(2 if tied else 1, LONGEST_DRAFT + 1)
    steps = published.allow("n_predict", config.get("n_predict", 3), allowed)
    published.tensors = {name.removeprefix("speculator."): value for name, value in published.tensors.items()}
    if tied:
        for name in ("emb.{}.weight", "head.{}.weight", "ln.{}.weight", "ln.{}.bias"):
            _drop_copies(published, [name.format(k) for k in range(steps)])
        _drop_copies(published, [f"proj.{k}.weight" for k in range(1, steps)])
    drafter = MlpSpeculator(H, V, steps, inner, tied, fms=True, scale_input=scaled)
    published.fill(drafter, lambda name: _of_fms(name, tied))
    return drafter


def _of_fms(name: str, tied: bool) -> str:
    """Return the name in IBM's layout of one of our tensors, without the prefix."""
    if name == "first_projection.weight":
        return "proj.0.weight"
    if tied:
        name = name.replace("steps.0.projection.", "proj.1.")
    parts = {"embedding": "emb", "projection": "proj", "norm": "ln"}
    name = re.sub(r"^steps\.(\d+)\.(\w+)\.", lambda match: f"{parts[match[2]]}.{match[1]}.", name)
    return re.sub(r"^lm_heads\.", "head.", name)
