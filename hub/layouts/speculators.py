"""The layout of vLLM's speculators: EAGLE-3, P-EAGLE, DFlash, DSpark and MTP."""

import re
from typing import Any

import torch
from torch import Tensor

from draftsmith.heads.eagle3 import OPTIONS
from draftsmith.hub.engines import VLLM, vllm_command
from draftsmith.hub.layouts.layout import Serving, Source, llama_fields, name_of, with_output_biases

# Shapes: H hidden size, F features, V vocabulary.

VERSION = "0.9.0"
"""Of the speculators package whose layout this is; tests load exports with it."""
ACCURATE = 1e-4
"""How far fc of `mask_hidden` may be from P-EAGLE's mask state, relative to it: rounding, not another state."""


def write_eagle3_speculator(source: Source) -> Serving:
    body, vocabulary = source.drafter.body, source.drafter.draft_vocabulary
    options = _eagle3_options(source)
    config = {"eagle_aux_hidden_state_layer_ids": _layer_ids(source), **options}
    config |= {"draft_vocab_size": body.config.vocab_size if vocabulary is None else len(vocabulary)}
    tensors = source.weights(body, lambda name: name.removeprefix("vocabulary."))
    _write(source, "eagle3", "Eagle3DraftModel", config, tensors)
    return Serving("vLLM", _command(source, "eagle3"), notes=_eagle3_notes(source))


def write_peagle_speculator(source: Source) -> Serving:
    """`mask_hidden` stands in for features and goes through fc; ours is the state behind it."""
    drafter, body, vocabulary = source.drafter, source.drafter.body, source.drafter.draft_vocabulary
    options = _eagle3_options(source)
    for option in ("norm_before_fc", "fc_norm", "norm_output"):  # which vLLM does not read for this type, or not all
        source.require(not options[option], f"{option}=True", "false, or format=transformers")
    config = {"eagle_aux_hidden_state_layer_ids": _layer_ids(source), **options, "mask_token_id": drafter.mask_token}
    config |= {"draft_vocab_size": body.config.vocab_size if vocabulary is None else len(vocabulary)}
    tensors = source.weights(body, lambda name: name.removeprefix("vocabulary."))
    tensors["mask_hidden"] = _before_fc(source, tensors["fc.weight"])[None, None]
    _write(source, "peagle", "PEagleDraftModel", config | {"embed_requires_grad": False}, tensors)
    notes = _eagle3_notes(source)
    notes.append("`mask_hidden` is a feature vector that `fc` maps to the trained mask state, the shortest one.")
    return Serving("vLLM", _command(source, "peagle"), notes=notes)


def _before_fc(source: Source, fc_HF: Tensor) -> Tensor:
    """[F] fp32: the shortest x with fc x = the mask state, for fc as it is stored."""
    state_H = source.drafter.mask_hidden.detach().cpu().double()
    found_F = torch.linalg.lstsq(fc_HF.double(), state_H[:, None], driver="gelsd").solution[:, 0].float()
    error = float((fc_HF.double() @ found_F.double() - state_H).norm() / state_H.norm().clamp_min(1e-12))
    source.require(
        error < ACCURATE,
        f"its mask state is no image of fc (off by {error:.1%})",
        "an fc of full rank, or format=transformers",
    )
    return found_F


def write_dflash_speculator(source: Source) -> Serving:
    """DFlash, and with DSpark's options DSpark. Embeddings are written only where the mask's was trained."""
    drafter = source.drafter
    rank, sure = drafter.options()["markov_rank"], drafter.confidence is not None
    kind, architecture = ("dspark", "DSparkDraftModel") if rank or sure else ("dflash", "DFlashDraftModel")
    mask_token, embeddings = _mask(source)
    config: dict[str, Any] = {
        "aux_hidden_state_layer_ids": _layer_ids(source),
        "block_size": drafter.block_size,
        "mask_token_id": mask_token,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "draft_vocab_size": drafter.vocab_size,
    }
    if kind == "dspark":
        config |= {"markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": sure}
        config["confidence_head_with_markov"] = bool(sure and rank)
    renamed = {"body.": "", "markov.": "markov_head.", "confidence.": "confidence_head.proj."}
    tensors = source.weights(drafter, lambda name: re.sub(r"^[a-z]+\.", lambda m: renamed[m[0]], name))
    del tensors["mask_embedding"]
    _write(source, kind, architecture, config, tensors | embeddings, model_type="qwen3")
    notes = [_ids_note(source), "The anchor is a committed token: `sample_from_anchor` is false, also for DSpark."]
    if embeddings:
        notes.append(
            f"The mask's embedding was trained. It is row {mask_token} of `embed_tokens`, which is the target's "
            "otherwise: an engine that takes the target's embeddings instead drafts worse (the speculators package "
            "does; vLLM keeps a file's own), and where a text holds this token it is read as a mask."
        )
    return Serving("vLLM", _command(source, kind), notes=notes)


def _mask(source: Source) -> tuple[int, dict[str, Tensor]]:
    """The token whose embedding masks have; if there is none, the last one, and embeddings in which it has it."""
    embeddings_VH = source.stored(source.target.get_input_embeddings().weight)
    mask_H = source.stored(source.drafter.body.mask_embedding)
    same = (embeddings_VH == mask_H).all(-1).nonzero()
    if len(same):
        return int(same[-1]), {}
    embeddings_VH[-1] = mask_H
    return len(embeddings_VH) - 1, {"embed_tokens.weight": embeddings_VH}


def write_mtp_speculator(source: Source) -> Serving:
    """`input_proj` reads [embedding; state] there, and the layers' config is the target's own."""
    body = source.drafter.body
    count = body.config.num_hidden_layers
    source.require(count == 1, f"{count} layers", "one layer, or format=transformers")
    tensors = source.weights(body, lambda name: f"mtp_layers.0.{name.removeprefix('layers.0.')}")
    state_HH, embedding_HH = tensors["mtp_layers.0.input_proj.weight"].chunk(2, 1)
    tensors["mtp_layers.0.input_proj.weight"] = torch.cat([embedding_HH, state_HH], 1)
    depth = source.text.num_hidden_layers
    _write(source, "mtp", "MTPDraftModel", {"num_nextn_predict_layers": 1}, tensors, num_hidden_layers=depth)
    notes = [
        "`input_proj` reads [embedding; state], as speculators does. (MiMo's own modules: [state; embedding].)",
        "The state is the target's behind its last norm.",
        "The speculators package and vLLM register modules of Qwen3's kinds alone: this one has Llama's layer. Use it "
        "where such a module can be registered, or `--format transformers`.",
    ]
    return Serving("vLLM", _command(source, "mtp"), notes=notes)


def _eagle3_options(source: Source) -> dict[str, bool]:
    options = {key: bool(source.drafter.options().get(key, False)) for key in OPTIONS}
    both = options["norm_before_fc"] and options["fc_norm"]
    source.require(not both, "norm_before_fc and fc_norm", "one of them, or format=transformers")
    return options


def _layer_ids(source: Source) -> list[int]:
    layers = list(source.drafter.needs.layers)
    fits = min(layers) >= 1 and len(set(layers)) == len(layers)
    source.require(fits, f"features of layers {layers}", "different layers >= 1, or format=transformers")
    return layers


def _write(
    source: Source,
    kind: str,
    architecture: str,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    **layer_changes: Any,
) -> None:
    body, dtype = source.drafter.body.config, name_of(source.dtype)
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
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind in ("eagle3", "peagle"):
        common["embed_requires_grad"] = False
    source.write({**common, **config}, with_output_biases(tensors, body))


def _command(source: Source, kind: str) -> str:
    return vllm_command(source.target_name, VLLM[kind], "{folder}", source.draft_length)


def _ids_note(source: Source) -> str:
    layers = list(source.drafter.needs.layers)
    return f"Layer ids are transformers' `hidden_states[k]`: {layers}. SGLang calls them {[k - 1 for k in layers]}."


def _eagle3_notes(source: Source) -> list[str]:
    notes = [
        _ids_note(source),
        "`norm_before_residual` is written: vLLM takes it for true where it is missing.",
        "Embeddings are the target's and left out; vLLM shares them.",
    ]
    if source.drafter.draft_vocabulary is not None:
        notes.append("`d2t` holds offsets (token = row + d2t[row]), `t2d` is a mask of tokens, not an index.")
    if len(source.drafter.needs.layers) != 3:
        notes.append("It reads other than three layers: vLLM versions whose `fc` is fixed at three refuse it.")
    return notes
