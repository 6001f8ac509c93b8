"""EAGLE-1, HASS and EAGLE-3 in the layout of the EAGLE repository and SGLang: a flat Llama config, `midlayer`.

Files are written for SGLang. The reader of EAGLE-3 also reads the layout of vLLM's speculators, including P-EAGLE.
"""

import re

import torch

from draftsmith.heads.eagle import Eagle
from draftsmith.heads.eagle3 import OPTIONS, Eagle3, ParallelEagle
from draftsmith.heads.formats.common import Serving, Source, full_lm_head, llama_fields, on_sglang
from draftsmith.heads.formats.published import LAYER_IDS, POSITIVE, Published
from draftsmith.heads.layers import windows_of

# Shapes: H hidden size, F size of the features, V target vocabulary, D draft vocabulary.


def read_eagle3(published: Published) -> Eagle3 | ParallelEagle:
    """Read EAGLE-3 in both layouts, and P-EAGLE, whose stored `mask_hidden` [1, 1, F] is an input of fc."""
    published.drop_zero_biases()
    published.drop_shared("embed_tokens.weight", published.target.get_input_embeddings())
    config, kind = published.config, published.config.get("speculators_model_type")
    eagle_config, depth = published.part("eagle_config"), published.text.num_hidden_layers
    flat = any(name.startswith("midlayer.") for name in published.tensors)
    first = "midlayer." if flat and not kind else "layers.0."
    if not kind:  # engines disagree about the ids outside of eagle_config
        published.allow(LAYER_IDS, config.get(LAYER_IDS), (None,))
        published.allow("use_aux_hidden_state", eagle_config.get("use_aux_hidden_state", True), (True,))
    ids, shift = (config.get(LAYER_IDS), 0) if kind else (eagle_config.get(LAYER_IDS), 1)
    if ids is None:
        ids, shift = [2, depth // 2, depth - 3], 0
    layers = published.layers(LAYER_IDS, ids, shift)
    body = published.body(published.part("transformer_layer_config") if kind else config, first)
    given = published.merged({"norm_before_residual": kind == "eagle3"}, config, eagle_config)
    options = {key: published.allow(key, given.get(key, False), (True, False)) for key in OPTIONS}
    V = body.vocab_size
    D = published.allow("draft_vocab_size", given.get("draft_vocab_size") or V, range(1, V + 1))
    size = D if D < V or "d2t" in published.tensors else None
    mask_11F = None
    if kind == "peagle":
        mask = published.allow("mask_token_id", config.get("mask_token_id"), range(V))
        length = published.allow("speculative_tokens", published.draft_length(), POSITIVE)
        sizes = {"num_tokens": length, "mask_token": mask, "draft_vocab_size": size}
        drafter = ParallelEagle(body, layers=layers, mask_before_fc=True, **sizes, **options)
        mask_11F = published.take("mask_hidden", f"float [1, 1, {len(layers) * body.hidden_size}]")
    else:
        drafter = Eagle3(body, layers=layers, draft_vocab_size=size, **options)
    published.fill(drafter.body, lambda name: name.removeprefix("vocabulary.").replace("layers.0.", first))
    published.sort_rows(drafter.body.vocabulary, [drafter.body.lm_head])
    if isinstance(drafter, ParallelEagle) and mask_11F is not None:
        drafter.mask_hidden.copy_(mask_11F.flatten())
    if D == V:
        drafter.body.vocabulary = None  # the rows are all tokens in order
    return drafter


def read_automodel_eagle3(published: Published) -> Eagle3 | ParallelEagle:
    """Read EAGLE-3 in the layout of NeMo Automodel 0.7.0, whose config.json has the number of the target's layers.

    It has one layer with full attention, names below `model.`, and no layer ids: engines assume the default ones.
    """
    published.allow("parallel_drafting", published.config.get("parallel_drafting", False), (False,))
    published.tensors = {name.removeprefix("model."): value for name, value in published.tensors.items()}
    published.config.update(num_hidden_layers=1, layer_types=None, sliding_window=None)
    return read_eagle3(published)


def read_deepspec_eagle3(published: Published) -> Eagle3:
    """Read EAGLE-3 in the layout of DeepSpec: one layer that norms queries and keys, and an lm_head of all tokens.

    Source: modeling/eagle3 in github.com/deepseek-ai/DeepSpec (afdfa7c).
    """
    published.drop_zero_biases()
    published.drop_shared("embed_tokens.weight", published.target.get_input_embeddings())
    config, body, depth = published.config, published.body(published.config), published.text.num_hidden_layers
    published.allow("num_target_layers", config.get("num_target_layers", depth), (depth,))
    published.allow("num_hidden_layers", body.num_hidden_layers, (1,))
    drafter = Eagle3(body, layers=published.layers("target_layer_ids", config.get("target_layer_ids"), 1), qk_norm=True)
    published.fill(drafter.body, lambda name: name)
    return drafter


def read_eagle1(published: Published) -> Eagle:
    """Read EAGLE-1, where the key `bias` belongs to fc."""
    published.require_plain_embeddings()
    published.drop_zero_biases()
    published.drop_shared("embed_tokens.weight", published.target.get_input_embeddings())
    published.drop_shared("lm_head.weight", published.target.get_output_embeddings())
    drafter = Eagle(published.body(published.config))
    if published.config.get("bias") is not True:
        published.tensors.setdefault("fc.bias", torch.zeros(published.text.hidden_size))
    published.fill(drafter.body, lambda name: name)
    return drafter


OTHERS = "format=vllm or transformers"


def write_eagle1_for_sglang(source: Source[Eagle]) -> Serving:
    """Write EAGLE-1 or HASS for SGLang, without embeddings, which it takes from the target."""
    _require_plain_layers(source, "format=transformers")
    source.require_plain_embeddings("format=transformers")
    body = source.drafter.body
    config = llama_fields(body.config, architectures=["LlamaForCausalLMEagle"], bias=True)
    weights = source.weights(body)
    source.write(config, {name: value for name, value in weights.items() if not name.startswith("vocabulary.")})
    hass = ["HASS is EAGLE-1's network: the engine runs it as EAGLE."] if source.drafter.type == "hass" else []
    return on_sglang(source, [*hass, *full_lm_head(source)])


def write_eagle3_for_sglang(source: Source[Eagle3]) -> Serving:
    """Write EAGLE-3 for SGLang."""
    layers, options = source.drafter.needs.layers, source.drafter.options()
    source.require(len(layers) == 3, f"features of layers {list(layers)}", f"three of them, or {OTHERS}")
    for option in ("norm_before_residual", "norm_before_fc"):  # no such keys: SGLang would ignore them silently
        source.require(not options.get(option), f"{option}=True", f"false, or {OTHERS}")
    _write_midlayer(source)
    notes = []
    if options.get("fc_norm") or options.get("norm_output"):
        notes.append(
            "EAGLE-3.1's `fc_norm` and `norm_output` need an SGLang that reads them; older versions ignore them."
        )
    return on_sglang(source, notes)


def _write_midlayer(source: Source[Eagle3]) -> None:
    """Write the flat layout, whose one layer is named `midlayer`."""
    drafter, body = source.drafter, source.drafter.body
    _require_plain_layers(source, OTHERS)
    count = body.config.num_hidden_layers
    source.require(count == 1, f"{count} layers", f"one layer, or {OTHERS}")
    source.require(min(drafter.needs.layers) >= 1, "the final state among its features", f"layers, or {OTHERS}")
    ids = [layer - 1 for layer in drafter.needs.layers]
    options = drafter.options()
    config = llama_fields(
        body.config,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=drafter.draft_vocab_size or body.config.vocab_size,
        target_hidden_size=source.text.hidden_size,
        fc_norm=options.get("fc_norm", False),
        norm_output=options.get("norm_output", False),
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    )
    own = re.compile(r"^layers\.0\.")
    source.write(config, source.weights(body, lambda name: own.sub("midlayer.", name).removeprefix("vocabulary.")))


def _require_plain_layers(source: Source[Eagle] | Source[Eagle3], otherwise: str) -> None:
    """Raise ConfigError for layers with biases or windows, which the layout would silently lose."""
    body = source.drafter.body.config
    for key in ("attention_bias", "mlp_bias"):
        source.require(not getattr(body, key), f"{key}=True", f"false, or {otherwise}")
    source.require(not source.drafter.options().get("qk_norm"), "qk_norm=True", f"false, or {otherwise}")
    window = next((size for size in windows_of(body) if size is not None), None)
    source.require(window is None, f"sliding_window={window}", f"full attention, or {otherwise}")
