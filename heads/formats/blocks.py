"""Published block drafters, DFlash, DFlash 2, LiLiCorr and DSpark: the layouts of vLLM's speculators, of z-lab (also of
SpecForge and SGLang) and of DeepSpec. The writer of speculators' layout is in `speculators`.

    layout        layer ids k             first predicting position    embeddings and lm_head    windows
    speculators   `hidden_states[k]`      by `sample_from_anchor`      stored; D <= V rows       from the anchor
    z-lab         `hidden_states[k + 1]`  the first mask               the target's              of each position
    transformers  `hidden_states[k + 1]`  the first mask               the target's              of each position
    NVIDIA        `hidden_states[k + 1]`  the mask; DSpark the anchor  the target's              of each position
    DeepSpec      `hidden_states[k + 1]`  the anchor                   stored                    none

No tensor tells them apart. Sources: speculators 0.9.0; dflash 0.1.0 (z-lab); nvidia-modelopt 0.47.0; DeepSpec's modules
modeling/dspark and eval/dspark (github.com/deepseek-ai/DeepSpec, afdfa7c).
"""

import re
import shlex
from typing import Any, get_args

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig

from draftsmith.heads.dflash import NEW_WINDOWS, DFlash
from draftsmith.heads.formats.common import (
    SGLANG,
    Serving,
    Source,
    llama_fields,
    name_of,
    on_sglang,
    on_vllm,
    with_output_biases,
)
from draftsmith.heads.formats.published import LARGE, POSITIVE, Published, Recorded
from draftsmith.heads.formats.speculators import (
    DFLASH2,
    LILICORR,
    MOST_CANDIDATES,
    block_tensors,
    lilicorr_name,
    mask_token_of,
    require_plain_target,
    trained_mask_note,
    vllm_kind,
    walk_fields,
    write_dflash_speculator,
)
from draftsmith.heads.lattice import ENGINES
from draftsmith.heads.layers import windows_of
from draftsmith.heads.lm_head import weight_of
from draftsmith.heads.transitions import Kind

# Shapes: H hidden size, V vocabulary, D draft vocabulary.

BOTH = (True, False)
IN_USE = "use_sliding_window"
MUSE_GLIMMER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names in transformers' `muse_glimmer_assistant`, and those elsewhere."""
CAUSAL = ("is_causal", "causal", "dflash_query_causal")
"""Keys of flat layouts on causality; the first that is there wins."""
AUTOMODEL = ("Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel")
"""Classes of NeMo Automodel 0.7.0, which writes `is_causal: false` beside the `causal: true` that JetSpec trains."""
PLAIN = {"output_multiplier": 1.0, "input_embedding_scale": 1.0}
PLAIN |= {"attention_value_scale": 1.0, "final_logit_softcapping": 0.0, "rope_is_neox_style": True}
PLAIN |= {"conv_kernel_size": None, "selector_rank": None, "use_correction_target_fusion": False}
"""Keys of flat layouts that change a drafter's outputs, with the values that leave them as here."""


WALKS = {DFLASH2[0]: "DFlash2DraftModel", LILICORR[0]: "LiLiCorrDraftModel"}
"""The class of a drafter by the first of its `walk_fields`."""


def read_speculators_block(published: Published) -> DFlash:
    """Read DFlash, DSpark and DFlash 2 in the layout of vLLM's speculators."""
    config, layers = published.config, published.part("transformer_layer_config")
    body = published.body(layers)
    windows = windows_of(body)
    body.layer_types = body.sliding_window = None  # a block counts its windows from the anchor
    kind, keys = config["speculators_model_type"], ("sample_from_anchor", "sliding_window_non_causal")
    anchored, non_causal, dspark = config.get(keys[0]), config.get(keys[1]), kind == "dspark"
    if kind == "dflash2" and non_causal is None:
        non_causal = True  # speculators 0.9.0 and vLLM 0.33 agree on it
    if dspark:  # missing: true in speculators 0.9.0, false in vLLM 0.33, whose windows are causal whatever is said
        anchored, non_causal = published.stated(keys[0], anchored, True), non_causal or False
    if any(windows) and not dspark and non_causal is None:  # false in speculators 0.9.0, true in vLLM 0.33
        raise published.refusal(f"no {keys[1]} in config.json, and engines differ without it", "true or false there")
    causal = any(windows) and not published.allow(keys[1], non_causal or False, BOTH)
    published.allow("is_causal", layers.get("is_causal"), (None,) if causal else (None, False))  # read by vLLM alone
    return _read(
        published,
        config,
        body,
        layers=published.layers("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids")),
        anchored=anchored or False,
        sees={"windows": windows, "causal_windows": causal or not any(windows)},
    )


def read_zlab(published: Published) -> DFlash:
    """Read DFlash, DFlash 2 or LiLiCorr in z-lab's layout, whose `dflash_config` wins over equal keys beside it.

    NVIDIA's DSpark names itself in `projector_type` only, and always predicts from the anchor.
    """
    config = published.merged(published.config, published.part("dflash_config"))
    if config.get("projector_type") == "dspark":
        published.allow("shift_label", config.get("shift_label"), (None, True))
        return read_deepspec(published)
    depth = published.text.num_hidden_layers
    published.allow("num_target_layers", config.get("num_target_layers", depth), (depth,))
    body, sees = _flat_body(published, config)
    published.allow("projector_type", config.get("projector_type"), (None, "dflash", "lilicorr"))
    for key in ("training_mode", "loss_type"):  # D2SD's second drafter
        if config.get(key) == "vp_drafter":
            raise published.refusal(
                f"{key}='vp_drafter' in config.json (it continues the drafts of another drafter)",
                "one that drafts from the anchor alone",
            )
    return _read(
        published,
        config,
        body,
        layers=published.layers("target_layer_ids", config.get("target_layer_ids"), 1),
        anchored=config.get("sample_from_anchor", False),
        sees=sees,
    )


def read_deepspec(published: Published) -> DFlash:
    """Read DSpark in the layout of DeepSpec, whose DFlash is a DSpark of rank 0, of SpecForge, or of NVIDIA.

    The latter have the same keys in `dflash_config`, and neither embeddings nor an lm_head.
    """
    config, depth = (
        published.merged(published.config, published.part("dflash_config")),
        published.text.num_hidden_layers,
    )
    published.allow("num_target_layers", config.get("num_target_layers", depth), (depth,))
    published.allow("projector_type", config.get("projector_type"), (None, "dspark"))
    layers = published.layers("target_layer_ids", config.get("target_layer_ids"), 1)
    body, sees = _flat_body(published, config)
    # Engines read a missing one as true in this layout, except beside `dspark_bonus_anchor`.
    bonus = published.allow("dspark_bonus_anchor", config.get("dspark_bonus_anchor", False), BOTH)
    anchored = config.get("sample_from_anchor", not bonus)
    published.allow("dspark_bonus_anchor", bonus, (not anchored,) if "dspark_bonus_anchor" in config else BOTH)
    return _read(published, config, body, layers=layers, anchored=anchored, sees=sees)


def _walk_keys(config: Recorded) -> tuple[str, ...]:
    """Return the keys that DFlash 2 or LiLiCorr must have."""
    named = config.get("architectures") or ()
    if config.get("speculators_model_type") == "dflash2" or "DFlash2DraftModel" in named or AUTOMODEL[1] in named:
        return DFLASH2
    convolved = any(config.get(key) for key in DFLASH2[:2])
    return (*LILICORR, *(DFLASH2[:2] if convolved else ())) if "LiLiCorrDraftModel" in named else ()


def _walk_options(published: Published, config: Recorded, body: LlamaConfig, block_size: int) -> dict[str, Any]:
    """Return the options of DFlash 2 or LiLiCorr; ConfigError for missing or wrong values."""
    V, H = body.vocab_size, body.hidden_size
    allowed: dict[str, range | tuple[int, ...]]
    allowed = {"conv_kernel_size": range(1, block_size + 1), "selector_top_k": range(1, V + 1)}
    allowed["conv_group_size"] = tuple(n for n in range(1, H + 1) if H % n == 0)
    allowed[LILICORR[0]] = tuple(2**n for n in range(V.bit_length()) if 2**n <= min(V, MOST_CANDIDATES))
    allowed["lilicorr_hidden_size"] = range(LARGE + 1)
    options = {}
    for key in _walk_keys(config):
        value, positive = config.get(key), ("lilicorr_mlp_ratio", "lilicorr_vector_eps", "lilicorr_logit_scale")
        if key in positive:
            fits = type(value) in (int, float) and 0 < value < LARGE
            options[key] = published.allow(key, value, (value,) if fits else ("a positive number",))
        else:
            options[key] = published.allow(key, value, allowed.get(key, POSITIVE))
    return options


def read_muse_glimmer(published: Published) -> DFlash:
    """Read transformers' `muse_glimmer_assistant`: DFlash whose windows have one position more on either side."""
    config = published.config
    try:
        theirs = AutoConfig.for_model(**config).to_dict()  # with the class's sizes where they are missing
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise published.refusal(f"config.json ({' '.join(str(error).split())})", "others") from error
    renamed = {"vocab_size": published.text.vocab_size, "model_type": "qwen3", IN_USE: True}
    body = published.body(theirs | renamed)
    windows = [None if size is None else size + 1 for size in windows_of(body)]
    body.layer_types = body.sliding_window = None
    for name, ours in MUSE_GLIMMER.items():
        if name in published.tensors:
            published.tensors[ours] = published.tensors.pop(name)
    layers = published.layers("target_layer_ids", config.get("target_layer_ids"), 1)
    return _read(published, config, body, layers=layers, anchored=False, sees={"windows": windows, **NEW_WINDOWS})


def fits_muse_glimmer(source: Source[DFlash]) -> bool:
    """Return whether transformers can run the drafter as a `muse_glimmer_assistant`, for a target of that family."""
    drafter, sees = source.drafter, source.drafter.body.sees
    sizes = {size for size in sees.windows if size is not None}
    plain = drafter.transitions is None and drafter.confidence is None and drafter.body.lm_head is None
    plain = (
        plain
        and drafter.body.convolution.conv_kernel_size == 0
        and drafter.body.first == 1
        and drafter.body.sinks(0) is None
        and drafter.mask_token is not None
    )
    windows = len(sizes) < 2 and not sees.causal and not (sizes and (sees.causal_windows or sees.windows_from_anchor))
    family = str(source.text.model_type).startswith("muse_glimmer")
    return family and plain and windows and min(drafter.needs.layers) >= 1 and drafter.body.plain_target


def write_muse_glimmer(source: Source[DFlash]) -> Serving:
    """Write a `muse_glimmer_assistant`, which transformers runs without code from elsewhere."""
    drafter, body = source.drafter, source.drafter.body.config
    attention = {key: value for key, value in _attention_fields(source).items() if key not in ("is_causal", IN_USE)}
    attention["sliding_window"] = attention.get("sliding_window", body.max_position_embeddings) - 1
    fields = {key: value for key, value in llama_fields(body).items() if key not in ("vocab_size", "mlp_bias")}
    config = {**fields, "model_type": "muse_glimmer_assistant", "architectures": ["MuseGlimmerAssistantModel"]}
    config |= {
        **attention,
        **_layer_fields(source),
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token,
    }
    theirs = {ours: name for name, ours in MUSE_GLIMMER.items()}
    source.write(config, {theirs.get(name, name): value for name, value in block_tensors(source).items()})
    usage = (
        "from transformers import AutoModel, AutoModelForImageTextToText\n\n"
        f'target = AutoModelForImageTextToText.from_pretrained("{source.target_name}")\n'
        'assistant = AutoModel.from_pretrained("{folder}")\n'
        'target.generate(**inputs, assistant_model=assistant, speculation_type="dflash")'
    )
    return Serving("transformers", usage, "python")


def _flat_body(published: Published, config: Recorded) -> tuple[LlamaConfig, dict[str, Any]]:
    """Return the config of the layers of a flat config.json, and the options of `DFlash` on what its positions see.

    `use_swa` gives all layers a window where `layer_types` names none, of `swa_window_size` or `sliding_window`.
    Of the keys on causality the first that is there holds for all layers; without one, layers with a window are causal.
    dflash 0.1.0 (z-lab), nvidia-modelopt 0.47.0, vLLM 0.33 and SGLang 0.5.23 agree on what they read of these.
    """
    for key, plain in PLAIN.items():
        if key not in _walk_keys(config):
            published.allow(key, config.get(key), (None, plain))
    fields, block, depth = dict(published.config), config.get("block_size"), published.config.get("num_hidden_layers")
    size = config.get("swa_window_size")
    everywhere = published.allow("use_swa", config.get("use_swa", False), BOTH)
    if size is not None:
        published.allow("swa_window_size", size, range(block if type(block) is int else 1, LARGE + 1))
        published.allow("sliding_window", config.get("sliding_window"), (None, size))
        fields |= {"sliding_window": size, IN_USE: True}
    kinds = config.get("layer_types")
    if everywhere and type(depth) is int:
        mixed = isinstance(kinds, list) and len({*map(str, kinds)}) > 1  # on which engines differ
        published.allow("use_swa", everywhere, (False,) if mixed else BOTH)
        fields |= {"layer_types": ["sliding_attention"] * depth, IN_USE: True}
    body = published.body(fields)
    windows = windows_of(body)
    body.layer_types = body.sliding_window = None
    keys = CAUSAL[::-1] if (config.get("architectures") or [None])[0] in AUTOMODEL else CAUSAL
    given = [published.allow(key, config.get(key), (None, *BOTH)) for key in keys]
    causal = next((value for value in given if value is not None), None)
    sinks = config.get("attention_sink_bias", config.get("add_swa_attention_sink_bias", False))
    return body, {
        "windows": windows,
        "causal_windows": causal is not False,
        "causal": causal or False,
        "windows_from_anchor": False,
        "attention_sinks": published.allow("attention_sink_bias", sinks, BOTH),
    }


def _read(
    published: Published,
    config: Recorded,
    body: LlamaConfig,
    *,
    layers: tuple[int, ...],
    anchored: Any,
    sees: dict[str, Any],
) -> DFlash:
    """Return the drafter that `config` and the tensors describe."""
    published.drop_zero_biases()
    tensors, V = published.tensors, body.vocab_size
    D = published.allow("draft_vocab_size", config.get("draft_vocab_size") or V, range(1, V + 1))
    shared = D == V and published.dropped("lm_head.weight", published.target.get_output_embeddings())
    kind = published.allow("markov_head_type", config.get("markov_head_type", "vanilla"), get_args(Kind))
    numbered = {theirs: ours for ours, theirs in ENGINES.items()}
    for name in list(tensors):
        short = re.sub(r"^(markov_head\.|candidate_selector\.|confidence_head\.|confidence_(?=proj\.))", "", name)
        short = lilicorr_name(short, numbered)
        if short != name and short in tensors:
            raise published.refusal(f"tensors {short} and {name}", "one of them")
        tensors[short] = tensors.pop(name)
    rank = tensors["markov_w1.weight"].shape[-1] if "markov_w1.weight" in tensors else 0
    rank = published.allow("markov_rank", config.get("markov_rank", rank), range(LARGE + 1))
    confidence_1H = tensors.get("proj.weight")
    if confidence_1H is not None and confidence_1H.shape == (1, body.hidden_size):
        tensors["proj.weight"] = nn.functional.pad(confidence_1H, (0, rank))  # without the Markov embedding as input
    confident = config.get("enable_confidence_head", config.get("use_confidence_head", confidence_1H is not None))
    mask_token = published.allow("mask_token_id", config.get("mask_token_id"), range(V))
    tensors["mask_embedding"], trained = _mask_embedding(published, mask_token)
    block_size = published.allow("block_size", config.get("block_size"), POSITIVE[1:])
    drafter = DFlash(
        body,
        layers=layers,
        block_size=block_size,
        anchors=64,  # used in training only
        sample_from_anchor=published.allow("sample_from_anchor", anchored, BOTH),
        **sees,
        plain_target=True,
        draft_vocab_size=None if shared else D,
        markov_rank=rank,
        markov_type=kind,
        confidence_head=published.allow("enable_confidence_head", confident, BOTH),
        mask_token=None if trained else mask_token,
        **_walk_options(published, config, body, block_size),
    )
    inside = re.compile(r"^(body\.vocabulary|body|markov|selector)\.")
    published.fill(drafter, lambda name: inside.sub("", name).replace("confidence.", "proj."))
    heads = [drafter.body.lm_head, None if drafter.markov is None else drafter.markov.markov_w2]
    published.sort_rows(drafter.draft_vocabulary, [head for head in heads if head is not None])
    return drafter


def _mask_embedding(published: Published, mask_token: int) -> tuple[Tensor, bool]:
    """Return the mask's embedding [H], and whether it was trained: from the drafter's embeddings, whose other rows must
    be the target's, or from these."""
    embeddings = published.target.get_input_embeddings()
    own_VH = weight_of(embeddings)
    theirs_VH = published.tensors.get("embed_tokens.weight")
    if theirs_VH is None or theirs_VH.shape != own_VH.shape:
        published.drop_shared("embed_tokens.weight", embeddings)
        mask_H = own_VH[mask_token].detach()
        return mask_H.new_zeros(own_VH.shape[1], device="cpu") if mask_H.is_meta else mask_H.cpu().clone(), False
    mask_H = theirs_VH[mask_token].clone()
    if own_VH.is_meta or published.dropped("embed_tokens.weight", embeddings):
        published.drop_shared("embed_tokens.weight", embeddings)
        return mask_H, False
    theirs_VH[mask_token] = own_VH[mask_token].to(theirs_VH)
    published.drop_shared("embed_tokens.weight", embeddings)
    return mask_H, True


def write_dflash_for_vllm(source: Source[DFlash]) -> Serving:
    """Write the layout of speculators; for attention that it cannot hold that of z-lab and NVIDIA, or DeepSpec's.

    Windows in the former count from the anchor, but not in vLLM.
    """
    drafter, sees = source.drafter, source.drafter.body.sees
    sinks = {"attention_sink_bias": True} if drafter.body.sinks(0) is not None else {}
    if not drafter.lilicorr and not sinks and not sees.causal and not any(sees.windows):
        return write_dflash_speculator(source)
    kind, (mask_token, embeddings), anchored = vllm_kind(source), mask_token_of(source), drafter.body.first == 0
    own, named = _attention_fields(source), {**_layer_fields(source), "mask_token_id": mask_token}
    second, architecture = walk_fields(source), "Qwen3DSparkModel" if kind == "dspark" else "DFlashDraftModel"
    if kind == "dspark":
        own |= {**named, **_dspark_fields(drafter), "dflash_config": sinks}
        own |= {"sample_from_anchor": anchored, "dspark_bonus_anchor": not anchored}
    else:
        own |= {"dflash_config": named | sinks | second}
    if drafter.body.lm_head is not None:
        own["draft_vocab_size"] = drafter.draft_vocab_size or drafter.vocab_size
    _write_flat(source, WALKS.get(next(iter(second), ""), architecture), own, embeddings)
    return on_vllm(source, kind, [trained_mask_note(mask_token)] if embeddings else [])


def write_dflash_for_sglang(source: Source[DFlash]) -> Serving:
    """Write DFlash, also 2, in z-lab's layout, which has neither embeddings nor an lm_head, and DSpark in DeepSpec's.

    SGLang uses the target's embeddings and lm_head for both.
    """
    drafter, dtype, named, own = source.drafter, name_of(source.dtype), _flat_fields(source), _attention_fields(source)
    second = walk_fields(source)
    if drafter.body.first == 0:
        shared = {
            "embed_tokens": source.target.get_input_embeddings(),
            "lm_head": source.target.get_output_embeddings(),
        }
        stored = {f"{name}.weight": source.stored(weight_of(part)) for name, part in shared.items()}
        own |= named | _dspark_fields(drafter)
        _write_flat(source, "Qwen3DSparkModel", own, stored)  # DeepSpec's class needs both
        algorithm, size = "DSPARK", "dspark-block-size"
        note = "A block of DSpark drafts as many tokens as it is long. SGLang requires a Markov head."
    else:
        own |= {"dflash_config": named | second}
        _write_flat(source, WALKS.get(next(iter(second), ""), "DFlashDraftModel"), own)
        algorithm, size = SGLANG["dflash"], "num-draft-tokens"
        note = "SGLang counts the last committed token as a draft token of DFlash: their number is the size of a block."
        if "is_causal" in own:
            note += " It needs an SGLang that reads `is_causal`, as 0.5.23 does: older versions ignore it."
    usage = (
        f"python -m sglang.launch_server --model-path {shlex.quote(source.target_name)} --dtype {dtype} \\\n"
        f"  --speculative-algorithm {algorithm} \\\n"
        f"  --speculative-draft-model-path {{folder}} --speculative-{size} {drafter.block_size} --enable-metrics"
    )
    return on_sglang(source, [note], usage)


def _flat_fields(source: Source[DFlash]) -> dict[str, Any]:
    """Return the keys of layers and mask in flat layouts; ConfigError for a drafter that these layouts cannot hold."""
    drafter, otherwise = source.drafter, "format=vllm or transformers"
    if drafter.body.first == 1:
        source.require(drafter.markov is None, f"markov_rank={drafter.options()['markov_rank']}", f"0, or {otherwise}")
        source.require(drafter.confidence is None, "a confidence head", f"none, or {otherwise}")
    require_plain_target(source)
    source.require(drafter.body.lm_head is None, "an lm_head of its own", f"the target's, or {otherwise}")
    sees = drafter.body.sees
    source.require(drafter.body.sinks(0) is None, "attention sinks", f"none, or {otherwise}")
    window = next((size for size in sees.windows if size is not None), None)
    if drafter.body.first == 0:  # of DSpark, only what DeepSpec's class does
        source.require(window is None, f"a window of {window} tokens", f"full attention, or {otherwise}")
        source.require(not sees.causal, "causal layers", f"layers that see the whole block, or {otherwise}")
    mask_token, embeddings = mask_token_of(source)
    source.require(not embeddings, "a trained mask embedding", f"the embedding of a token, or {otherwise}")
    return {**_layer_fields(source), "mask_token_id": mask_token}


def _layer_fields(source: Source[DFlash]) -> dict[str, Any]:
    """Return the key of the target's layers in flat layouts."""
    layers = source.drafter.needs.layers
    source.require(min(layers) >= 1, "the final state among its features", "layers, or format=transformers")
    return {"target_layer_ids": [layer - 1 for layer in layers]}


def _attention_fields(source: Source[DFlash]) -> dict[str, Any]:
    """Return the keys of windows and causality in flat layouts; raise ConfigError for what they cannot express."""
    sees = source.drafter.body.sees
    sizes = sorted({size for size in sees.windows if size is not None})
    source.require(len(sizes) < 2, f"windows of {sizes} tokens", "one size, or format=transformers")
    counted = not sizes or not sees.windows_from_anchor
    problem = "a window that counts from the anchor, which engines count from each position"
    source.require(counted, problem, "one of positions, or format=transformers")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in sees.windows]
    fields: dict[str, Any] = {"layer_types": kinds}
    if sizes:
        fields |= {"sliding_window": sizes[0], IN_USE: True}
    if sees.causal:
        return fields | {"is_causal": True}
    return fields | ({"is_causal": False} if sizes and not sees.causal_windows else {})


def _write_flat(
    source: Source[DFlash], architecture: str, own: dict[str, Any], stored: dict[str, Tensor] | None = None
) -> None:
    """Write a flat config.json with the keys `own`, and the tensors, with those of the target in `stored`."""
    drafter, body = source.drafter, source.drafter.body.config
    config = llama_fields(
        body,
        model_type="qwen3",
        architectures=[architecture],
        block_size=drafter.block_size,
        num_target_layers=source.text.num_hidden_layers,
        **own,
    )
    source.write(config, with_output_biases(block_tensors(source) | (stored or {}), body))


def _dspark_fields(drafter: DFlash) -> dict[str, Any]:
    """Return the keys of DSpark's heads in DeepSpec's layout, whose classes need `num_anchors`, of training, too."""
    rank, confident = drafter.options()["markov_rank"], drafter.confidence is not None
    fields = {"markov_rank": rank, "enable_confidence_head": confident, "num_anchors": drafter.anchors}
    if rank:
        fields["markov_head_type"] = drafter.options()["markov_type"]
    return fields | ({"confidence_head_with_markov": bool(rank)} if confident else {})
