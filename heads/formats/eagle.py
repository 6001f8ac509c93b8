"""EAGLE-1, HASS and EAGLE-3 as the EAGLE repository and SGLang read them: a flat Llama config, `midlayer`."""

from typing import Any

from draftsmith.heads.eagle3 import OPTIONS
from draftsmith.heads.formats.common import Serving, Source, llama_fields, name_of
from draftsmith.heads.formats.transformers import sglang_usage

OTHERS = "format=vllm or transformers"


def write_eagle1(source: Source) -> Serving:
    """With the target's embeddings: the repository loads these weights strictly."""
    tensors = source.weights(source.drafter.body)
    tensors["embed_tokens.weight"] = source.stored(source.target.get_input_embeddings().weight)
    source.write(_eagle1_config(source, "LlamaForCausalLM"), tensors)
    notes = ["`bias` is written as true: it says that `fc` has one.", *_hass(source)]
    return Serving("the EAGLE repository", _original(source, use_eagle3=False), "python", notes)


def write_eagle1_for_sglang(source: Source) -> Serving:
    """Without embeddings, which SGLang takes from the target."""
    source.write(_eagle1_config(source, "LlamaForCausalLMEagle"), source.weights(source.drafter.body))
    return Serving("SGLang", sglang_usage(source), notes=_hass(source))


def _eagle1_config(source: Source, architecture: str) -> dict[str, Any]:
    body = source.drafter.body.config
    _require_plain_layers(source, "format=transformers")
    dtype = name_of(source.dtype)
    return llama_fields(body, architectures=[architecture], bias=True, dtype=dtype, torch_dtype=dtype)


def _hass(source: Source) -> list[str]:
    return ["HASS is EAGLE-1's network: the engine runs it as EAGLE."] if source.drafter.type == "hass" else []


def write_eagle3(source: Source) -> Serving:
    """The repository reads the inputs of the target's layers 2, L/2 and L - 3, and nothing else."""
    depth = source.text.num_hidden_layers
    wanted, layers = (2, depth // 2, depth - 3), source.drafter.needs.layers
    source.require(depth > 6, f"a target of {depth} layers", f"more than 6, or {OTHERS}")  # or the three are not three
    source.require(layers == wanted, f"features of layers {list(layers)}", f"{list(wanted)}, or {OTHERS}")
    for option in OPTIONS:
        source.require(not source.drafter.options().get(option), f"{option}=True", f"false, or {OTHERS}")
    _write_midlayer(source)
    return Serving("the EAGLE repository", _original(source, use_eagle3=True), "python", _eagle3_notes(source))


def write_eagle3_for_sglang(source: Source) -> Serving:
    layers, options = source.drafter.needs.layers, source.drafter.options()
    source.require(len(layers) == 3, f"features of layers {list(layers)}", f"three of them, or {OTHERS}")
    for option in ("norm_before_residual", "norm_before_fc"):  # there are no such keys: SGLang would say nothing
        source.require(not options.get(option), f"{option}=True", f"false, or {OTHERS}")
    _write_midlayer(source)
    notes = _eagle3_notes(source)
    if options.get("fc_norm") or options.get("norm_output"):
        notes.append("EAGLE-3.1's `fc_norm` and `norm_output` need an SGLang that knows them; older ones ignore them.")
    return Serving("SGLang", sglang_usage(source), notes=notes)


def _write_midlayer(source: Source) -> None:
    drafter, body = source.drafter, source.drafter.body
    _require_plain_layers(source, OTHERS)
    count = body.config.num_hidden_layers
    source.require(count == 1, f"{count} layers", f"one layer, or {OTHERS}")
    source.require(min(drafter.needs.layers) >= 1, "the final state among its features", f"layers, or {OTHERS}")
    ids = [layer - 1 for layer in drafter.needs.layers]
    dtype, vocabulary = name_of(source.dtype), drafter.draft_vocabulary
    options = drafter.options()
    config = llama_fields(
        body.config,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=body.config.vocab_size if vocabulary is None else len(vocabulary),
        target_hidden_size=source.text.hidden_size,
        fc_norm=options.get("fc_norm", False),
        norm_output=options.get("norm_output", False),
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
        dtype=dtype,
        torch_dtype=dtype,
    )
    rename = {"layers.0.": "midlayer.", "vocabulary.": ""}
    source.write(config, source.weights(body, lambda name: _renamed(name, rename)))


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    for ours, theirs in prefixes.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def _require_plain_layers(source: Source, otherwise: str) -> None:
    """Biases would be dropped without a word."""
    for key in ("attention_bias", "mlp_bias"):
        found = getattr(source.drafter.body.config, key)
        source.require(not found, f"{key}=True", f"false, or {otherwise}")


def _eagle3_notes(source: Source) -> list[str]:
    ids = [layer - 1 for layer in source.drafter.needs.layers]
    notes = [
        f"Layer ids count blocks here: {ids} is what vLLM's layout calls {list(source.drafter.needs.layers)}.",
        "The layer is named `midlayer`: SGLang silently drops `layers.0`. Embeddings are the target's and left out.",
    ]
    if source.drafter.draft_vocabulary is not None:
        notes.append("`d2t` holds offsets (token = row + d2t[row]), `t2d` is a mask of tokens.")
    return notes


def _original(source: Source, *, use_eagle3: bool) -> str:
    return (
        "from eagle.model.ea_model import EaModel\n\n"
        f'model = EaModel.from_pretrained(base_model_path="{source.target_name}", ea_model_path="{{folder}}",\n'
        f"                                use_eagle3={use_eagle3})"
    )
