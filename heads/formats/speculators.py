"""The layout of vLLM's speculators: EAGLE-3, P-EAGLE, DFlash, DSpark, DFlash 2; and MTP, not loaded by vLLM.

EAGLE-3's reader is in `eagle`, those of block drafters are in `blocks`.
"""

import re
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import ConfigError
from draftsmith.heads.base import FINAL
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.eagle3 import OPTIONS, Eagle3, ParallelEagle
from draftsmith.heads.formats.common import (
    Serving,
    Source,
    llama_fields,
    on_vllm,
    with_output_biases,
)
from draftsmith.heads.formats.native_mtp import OWN, represented
from draftsmith.heads.formats.native_mtp import SPECULATORS as SPECULATORS_MTP
from draftsmith.heads.formats.published import Published
from draftsmith.heads.lattice import ENGINES, LatticeOptions
from draftsmith.heads.layers import windows_of
from draftsmith.heads.lm_head import logits_map, weight_of
from draftsmith.heads.mtp import Mtp

# Shapes: H hidden size, F size of the features, V vocabulary.

VERSION = "0.9.0"
"""Version of the speculators package that defines the layout; tests load exports with it."""
ACCURATE = 1e-4
"""Maximum relative distance of fc(`mask_hidden`) from P-EAGLE's mask state; rounding stays below it."""


UNANCHORED = ("sample_from_anchor=True without markov_rank or confidence_head", "false, or format=transformers")
"""A DFlash that vLLM refuses to start with, and what it serves."""
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""The options and keys of DFlash 2; the first two may be those of LiLiCorr."""
LILICORR = tuple(field.name for field in fields(LatticeOptions))
"""The options and keys of LiLiCorr."""
MOST_CANDIDATES = 16
"""The candidates of LiLiCorr that vLLM 0.32 and SGLang 0.5.23 accept; their number is a power of two."""
OWN_LAYERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Model types of MTP layers that are built from the target's own config; the package's others are Llama-like."""


def read_mtp(published: Published) -> Mtp:
    """Read MTP, whose stored input_proj reads [embedding; state], ours [state; embedding].

    Layers of a type in `OWN_LAYERS` are those of the target.
    """
    published.drop_zero_biases()
    published.drop_shared("embed_tokens.weight", published.target.get_input_embeddings())
    published.drop_shared("lm_head.weight", published.target.get_output_embeddings())
    published.allow("num_nextn_predict_layers", published.config.get("num_nextn_predict_layers", 1), (1,))
    fields, prefix = published.part("transformer_layer_config"), "mtp_layers.0."
    if fields.get("model_type") in OWN_LAYERS:
        published.allow("model_type", fields["model_type"], (published.text.model_type,))
        tensors = {name.removeprefix(prefix): value for name, value in published.tensors.items()}
        try:
            body, options, weights = represented(published.target, SPECULATORS_MTP, tensors)
        except ConfigError as error:
            raise ConfigError(f"drafter={published.folder}: {str(error).removeprefix(OWN)}") from error
        drafter = Mtp(body, layers=(FINAL,), **options)
        drafter.body.load_state_dict(weights)
        return drafter
    normed = {"qk_norm": True} if f"{prefix}self_attn.q_norm.weight" in published.tensors else {}
    drafter = Mtp(published.body(fields, prefix, num_hidden_layers=1), layers=(FINAL,), **normed)
    published.fill(drafter.body, lambda name: f"mtp_layers.0.{name.removeprefix('layers.0.')}")
    drafter.body.input_proj.weight.copy_(torch.cat(drafter.body.input_proj.weight.chunk(2, 1)[::-1], 1))
    return drafter


def write_eagle3_speculator(source: Source[Eagle3]) -> Serving:
    """Write EAGLE-3."""
    body = source.drafter.body
    options = _eagle3_options(source)
    config = {"eagle_aux_hidden_state_layer_ids": _layer_ids(source), **options}
    config |= {"draft_vocab_size": source.drafter.draft_vocab_size or body.config.vocab_size}
    tensors = source.weights(body, lambda name: name.removeprefix("vocabulary."))
    _write(source, "eagle3", "Eagle3DraftModel", config, tensors)
    return on_vllm(source, "eagle3", [])


def write_peagle_speculator(source: Source[ParallelEagle]) -> Serving:
    """Write P-EAGLE, whose stored `mask_hidden` is an input of fc; ours is an output without `mask_before_fc`."""
    drafter, body = source.drafter, source.drafter.body
    options = _eagle3_options(source)
    for option in ("norm_before_fc", "fc_norm", "norm_output"):  # vLLM does not read all of them for this type
        source.require(not options[option], f"{option}=True", "false, or format=transformers")
    config = {"eagle_aux_hidden_state_layer_ids": _layer_ids(source), **options, "mask_token_id": drafter.mask_token}
    config |= {"draft_vocab_size": source.drafter.draft_vocab_size or body.config.vocab_size}
    tensors = source.weights(body, lambda name: name.removeprefix("vocabulary."))
    given = drafter.mask_before_fc
    mask_F = source.stored(drafter.mask_hidden) if given else _before_fc(source, tensors["fc.weight"])
    tensors["mask_hidden"] = mask_F[None, None]
    _write(source, "peagle", "PEagleDraftModel", config | {"embed_requires_grad": False}, tensors)
    return on_vllm(source, "peagle", [])


def _before_fc(source: Source[ParallelEagle], fc_HF: Tensor) -> Tensor:
    """Return the shortest x with fc x = the mask state, [F] fp32, for fc as it is stored."""
    state_H = source.drafter.mask_hidden.detach().cpu().double()
    input_F = torch.linalg.lstsq(fc_HF.double(), state_H[:, None], driver="gelsd").solution[:, 0].float()
    error = float((fc_HF.double() @ input_F.double() - state_H).norm() / state_H.norm().clamp_min(1e-12))
    source.require(
        error < ACCURATE,
        f"a mask state that fc cannot produce (relative error {error:.1%})",
        "an fc of full rank, or format=transformers",
    )
    return input_F


def vllm_kind(source: Source[DFlash]) -> str:
    """Return `dflash`, or `dspark` for its options; raise ConfigError for a drafter that vLLM does not run."""
    drafter = source.drafter
    kind = "dspark" if drafter.markov is not None or drafter.confidence is not None else "dflash"
    markov_type = drafter.options()["markov_type"]  # vLLM reads vanilla ones only
    source.require(markov_type == "vanilla", f"markov_type={markov_type}", "vanilla, or format=sglang or transformers")
    source.require(kind == "dspark" or drafter.body.first == 1, *UNANCHORED)
    require_plain_target(source)
    return kind


def require_plain_target(source: Source[DFlash]) -> None:
    """Raise ConfigError for a drafter that reads scaled embeddings or logits of its target, which engines do not."""
    if not source.drafter.body.plain_target:
        source.require_plain_embeddings("format=transformers")
        plain = source.drafter.body.lm_head is not None or logits_map(source.target).is_identity
        source.require(plain, "a target that scales or caps its logits", "another target, or format=transformers")


def write_dflash_speculator(source: Source[DFlash]) -> Serving:
    """Write DFlash, DSpark or DFlash 2 without windows, with embeddings only where the mask's embedding was trained."""
    drafter, kind, second = source.drafter, vllm_kind(source), walk_fields(source)
    rank, confident, anchored = (
        drafter.options()["markov_rank"],
        drafter.confidence is not None,
        drafter.body.first == 0,
    )
    layout, architecture = kind, "DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"
    if second:
        layout, architecture = "dflash2", "DFlash2DraftModel"
    mask_token, embeddings = mask_token_of(source)
    config: dict[str, Any] = {
        "aux_hidden_state_layer_ids": _layer_ids(source),
        "block_size": drafter.block_size,
        "mask_token_id": mask_token,
        "sample_from_anchor": anchored,
        "sliding_window_non_causal": True,  # by this key vLLM makes all layers causal, or none
        "draft_vocab_size": drafter.draft_vocab_size or drafter.vocab_size,
    }
    config |= second
    if kind == "dspark":
        config |= {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": confident}
        config["confidence_head_with_markov"] = bool(confident and rank)
    tensors = block_tensors(source) | embeddings
    _write(source, layout, architecture, config, tensors, model_type="qwen3")
    return on_vllm(source, kind, [trained_mask_note(mask_token)] if embeddings else [])


def trained_mask_note(mask_token: int) -> str:
    """Return the note on a file whose embeddings have a trained mask."""
    return (
        f"The mask's embedding was trained. It is row {mask_token} of `embed_tokens`, whose other rows are the "
        "target's. An engine that uses the target's embeddings instead drafts worse (the speculators package does; "
        "vLLM keeps the file's), and this token is read as a mask where a text contains it."
    )


def walk_fields(source: Source[DFlash]) -> dict[str, Any]:
    """Return the keys of DFlash 2 or LiLiCorr; raise ConfigError for what their layouts cannot express."""
    drafter, options = source.drafter, source.drafter.options()
    rank, taps, candidates = (options[key] for key in ("selector_rank", "conv_kernel_size", LILICORR[0]))
    said, otherwise = f"selector_rank={rank}, conv_kernel_size={taps}", "format=transformers"
    source.require(bool(rank) == bool(taps) or candidates > 0, said, f"both or none of them, or {otherwise}")
    served = candidates <= MOST_CANDIDATES and candidates & (candidates - 1) == 0
    expected = f"a power of two, at most {MOST_CANDIDATES}, or {otherwise}"
    source.require(served, f"{LILICORR[0]}={candidates}", expected)
    if not rank and not candidates:
        return {}
    for fits, value in (
        (drafter.body.first == 1, "sample_from_anchor=True"),
        (drafter.confidence is None, "a confidence head"),
        (drafter.draft_vocabulary is None, f"a draft vocabulary of {drafter.draft_vocab_size} tokens"),
    ):
        source.require(fits, f"{value} with {said}, {LILICORR[0]}={candidates}", f"one of them, or {otherwise}")
    keys = DFLASH2 if rank else (*LILICORR, *(DFLASH2[:2] if taps else ()))
    return {key: options[key] for key in keys}


def block_tensors(source: Source[DFlash]) -> dict[str, Tensor]:
    """Return the tensors of a block drafter, without the mask's embedding."""
    renamed = {"body.": "", "markov.": "markov_head.", "confidence.": "confidence_head.proj."}
    renamed |= {"selector.": "candidate_selector.", "lilicorr.": "lilicorr."}

    def published(name: str) -> str:
        name = re.sub(r"^[a-z]+\.", lambda m: renamed[m[0]], name).removeprefix("vocabulary.")
        return lilicorr_name(name, ENGINES)

    tensors = source.weights(source.drafter, published)
    del tensors["mask_embedding"]
    return tensors


def lilicorr_name(name: str, parts: dict[str, str]) -> str:
    """Return the name of a tensor with the `parts` of LiLiCorr's replaced; others are unchanged."""
    for part, other in parts.items() if name.startswith("lilicorr.") else ():
        name = name.replace(part, other)
    return name


def mask_token_of(source: Source[DFlash]) -> tuple[int, dict[str, Tensor]]:
    """Return the token with the mask's embedding; without one the last token, and embeddings with the mask's there."""
    embeddings = source.target.get_input_embeddings()
    weight_VH = weight_of(embeddings)
    plain = source.drafter.body.plain_target
    embeddings_VH = weight_VH if plain else embeddings(torch.arange(len(weight_VH), device=weight_VH.device))
    embeddings_VH = source.stored(embeddings_VH)
    mask_H = source.stored(source.drafter.body.mask_embedding)
    same = (embeddings_VH == mask_H).all(-1).nonzero()
    if len(same):
        return int(same[-1]), {}
    embeddings_VH[-1] = mask_H
    return len(embeddings_VH) - 1, {"embed_tokens.weight": embeddings_VH}


def _eagle3_options(source: Source[Eagle3] | Source[ParallelEagle]) -> dict[str, bool]:
    """Return EAGLE-3's boolean options; raise ConfigError for a combination that the layout cannot express."""
    options = {key: bool(source.drafter.options().get(key, False)) for key in OPTIONS}
    source.require(not source.drafter.options().get("qk_norm"), "qk_norm=True", "false, or format=transformers")
    both = options["norm_before_fc"] and options["fc_norm"]
    source.require(not both, "norm_before_fc and fc_norm", "one of them, or format=transformers")
    return options


def _layer_ids(source: Source[Any]) -> list[int]:
    """Return the target's layers that the drafter reads; raise ConfigError for the final state or repeated layers."""
    layers = list(source.drafter.needs.layers)
    fits = min(layers) >= 1 and len(set(layers)) == len(layers)
    source.require(fits, f"features of layers {layers}", "different layers >= 1, or format=transformers")
    return layers


def _write(
    source: Source[Any],
    kind: str,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    **layer_changes: Any,
) -> None:
    """Write config.json, with `config` and the keys that all types share, and the tensors.

    The config of the layers is the body's with `layer_changes`.
    """
    body = source.drafter.body.config
    windows = windows_of(body)
    sizes = {size for size in windows if size is not None}
    source.require(len(sizes) < 2, f"windows of {sorted(sizes)} tokens", "one size, or format=transformers")
    if sizes:
        kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
        layer_changes |= {"layer_types": kinds, "sliding_window": sizes.pop(), "use_sliding_window": True}
    proposal = {"proposal_type": "greedy", "speculative_tokens": source.draft_length}
    methods = [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}]
    common = {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": methods,
            "verifier": {"name_or_path": source.target_name, "architectures": source.target_architectures},
        },
        "transformer_layer_config": llama_fields(body, **layer_changes),
        "target_hidden_size": source.text.hidden_size,
        "tie_word_embeddings": False,
    }
    if kind in ("eagle3", "peagle"):
        common["embed_requires_grad"] = False
    parts: dict[str, nn.Module | None] = {"embed_tokens.weight": source.target.get_input_embeddings()}
    parts["lm_head.weight"] = source.target.get_output_embeddings()
    shared = {name: source.stored(weight_of(parts[name])) for name in source.drafter.shared_tensors}
    source.write({**common, **config}, with_output_biases(shared | tensors, body))
