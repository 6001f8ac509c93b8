"""The layout of vLLM's speculators: EAGLE-3, P-EAGLE, DFlash, DSpark and MTP.

Drafters as other projects publish them: EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DSpark, MTP and Medusa.

`config.json` and the names of the tensors tell a folder's layout; of weights only safetensors are read. Layouts count
the target's layers in two ways: speculators' id k is transformers' `hidden_states[k]`, as in `Needs.layers`; SGLang's
is the output of block k, which is `hidden_states[k + 1]`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import ConfigError
from draftsmith.heads.base import TrainableDrafter
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.draft_vocab import DraftVocabulary
from draftsmith.heads.eagle import Eagle
from draftsmith.heads.eagle3 import OPTIONS, Eagle3
from draftsmith.heads.formats.common import (
    VLLM,
    Serving,
    Source,
    llama_fields,
    name_of,
    vllm_command,
    with_output_biases,
)
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.mtp import Mtp
from draftsmith.heads.peagle import ParallelEagle

# Shapes: H hidden size, V target vocabulary, D draft vocabulary, F features.

LLAMA_LIKE = ("llama", "qwen2", "qwen3")
"""Model types whose layers are Llama's but for what shows in their tensors: biases, norms of heads."""
KEPT = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "hidden_act")
KEPT += ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias")
KEPT += ("mlp_bias",)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LARGE = 2**40
POSITIVE = range(1, LARGE + 1)


@dataclass
class Published:
    """A folder whose layout was recognised, and the target that it is to fit, with its text config."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: nn.Module
    text: Any

    def refusal(self, found: str, expected: str) -> ConfigError:
        return ConfigError(f"drafter={self.folder}: {found}; expected {expected}")

    def allow(self, key: str, found: Any, allowed: range | tuple) -> Any:
        """`found`, which config.json says of `key`; ConfigError unless it is one of `allowed`."""
        whole = isinstance(allowed, range)
        if (whole and type(found) is not int) or found not in allowed:  # a range is walked through for what is no int
            words = f"an integer, {allowed[0]} to {allowed[-1]}" if whole else ", ".join(map(str, allowed))
            expected = words.replace(f" to {LARGE}", " or more") if whole or len(allowed) < 2 else f"one of {words}"
            raise self.refusal(f"{key}={found!r} in config.json", expected)
        return found

    def part(self, key: str) -> dict[str, Any]:
        """A mapping in config.json; empty where there is none."""
        part = self.config.get(key) or {}
        if not isinstance(part, dict):
            raise self.refusal(f"{key}={part!r} in config.json", "a mapping")
        return part

    def layers(self, key: str, ids: Any, shift: int = 0) -> tuple[int, ...]:
        """Layers as `Needs.layers` counts them, which is `shift` more than the layout."""
        first, last = 1 - shift, self.text.num_hidden_layers - shift
        if not isinstance(ids, list) or not ids or not all(type(k) is int and first <= k <= last for k in ids):
            raise self.refusal(f"{key}={ids!r}", f"a list of the target's layers, {first} to {last}")
        return tuple(k + shift for k in ids)

    def draft_length(self, most: int = LARGE) -> int | None:
        methods = self.part("speculators_config").get("proposal_methods") or [{}]
        if not isinstance(methods, list) or not isinstance(methods[0], dict):
            raise self.refusal(f"proposal_methods={methods!r} in config.json", "a list of mappings")
        length = methods[0].get("speculative_tokens")
        return None if length is None else self.allow("speculative_tokens", length, range(1, most + 1))

    def body(self, fields: dict[str, Any], first: str = "layers.0.", **changes: int) -> LlamaConfig:
        """The drafter's layers, of which `first` is the first. `fields` leave out what their model type has anyway."""
        kind = self.allow("model_type", fields.get("model_type", "llama"), LLAMA_LIKE)
        try:
            theirs = AutoConfig.for_model(**{**fields, "model_type": kind})
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise self.refusal(f"the layers in config.json ({' '.join(str(error).split())})", "others") from error
        rope, heads, hidden = theirs.rope_parameters, theirs.num_attention_heads, self.text.hidden_size
        self.allow("hidden_size", theirs.hidden_size, (hidden,))
        self.allow("target_hidden_size", self.config.get("target_hidden_size"), (None, hidden))
        self.allow("vocab_size", theirs.vocab_size, (self.text.vocab_size,))
        self.allow("rope_type", rope["rope_type"], ("default", *ROPE_INIT_FUNCTIONS))
        self.allow("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
        self.allow("layer_types", set(getattr(theirs, "layer_types", None) or ()), (set(), {"full_attention"}))
        divisors = tuple(n for n in range(1, heads + 1) if heads % n == 0)
        self.allow("num_key_value_heads", theirs.num_key_value_heads, divisors)
        if f"{first}self_attn.q_proj.bias" in self.tensors:
            changes["attention_bias"] = True
        values = {key: getattr(theirs, key) for key in KEPT if hasattr(theirs, key)}
        return LlamaConfig(**{**values, "bos_token_id": None, "eos_token_id": None, **changes})

    def drop_shared(self, name: str, part: nn.Module) -> None:
        """Leave out a tensor that is the target's own, in whichever dtype; ConfigError where it is another."""
        own = part.weight.detach().cpu()
        theirs = self.tensors.pop(name, own)
        if not any(torch.equal(theirs.to(dtype), own.to(dtype)) for dtype in (own.dtype, theirs.dtype)):
            what = "embeddings" if name.startswith("embed") else "an lm_head"
            found = f"tensor {name} {list(theirs.shape)} is not the target's {list(own.shape)}"
            raise self.refusal(found, f"the same: drafters of this kind with {what} of their own are not supported")

    def drop_zero_biases(self) -> None:
        """Leave out biases behind attention that add nothing: engines want them where the inputs have some."""
        for name in [name for name in self.tensors if name.endswith("self_attn.o_proj.bias")]:
            if not self.tensors[name].any():
                del self.tensors[name]

    def take(self, name: str, wanted: str) -> Tensor:
        """Remove a tensor from those that are still to be read; ConfigError unless it is as `wanted`, see `_words`."""
        found = self.tensors.pop(name, None)
        if found is None or _words(found) != wanted:
            raise self.refusal(f"no tensor {name}" if found is None else f"tensor {name} is {_words(found)}", wanted)
        return found

    def fill(self, module: nn.Module, published: Callable[[str], str]) -> None:
        """Load `module`, whose tensor x is called `published(x)` here, from all tensors that are left."""
        shapes = {name: _words(value) for name, value in module.state_dict().items()}
        module.load_state_dict({name: self.take(published(name), wanted) for name, wanted in shapes.items()})
        for name in sorted(name for name in self.tensors if "rotary_emb." not in name):
            raise self.refusal(f"unexpected tensor {name} {list(self.tensors[name].shape)}", "none of that name")

    def sort_rows(self, vocabulary: DraftVocabulary | None, heads: list[nn.Linear]) -> None:
        """Bring rows into the order of their tokens."""
        if vocabulary is not None:
            tokens_D, order_D = vocabulary.tokens_D.sort()
            vocabulary.d2t.copy_(tokens_D - torch.arange(len(tokens_D)))
            for head in heads:
                head.weight.copy_(head.weight[order_D])
            vocabulary.require_consistent(self.folder)


def read_published(folder: Path, config: dict[str, Any], target: nn.Module) -> TrainableDrafter | None:
    """The drafter in `folder`, not attached yet; None where it is none that was published. ConfigError for a misfit."""
    published = Published(folder, config, {}, target, target.config.get_text_config(decoder=True))
    read = _runner(published)
    if read is None:
        return None
    published.tensors = _tensors(folder)
    if not published.tensors:
        raise published.refusal("no *.safetensors in the folder", "weights in such files: pickled ones are not read")
    published.allow("logit_scale", config.get("logit_scale", 1.0), (1.0,))
    if read is not _medusa:
        published.drop_zero_biases()
    if read not in (_medusa, _dflash):
        published.drop_shared("embed_tokens.weight", target.get_input_embeddings())
    if read in (_eagle, _mtp, _dflash):
        published.drop_shared("lm_head.weight", target.get_output_embeddings())
    with torch.no_grad():
        drafter = read(published)
    drafter.draft_length_hint = published.draft_length(drafter.max_draft_length or LARGE)
    return drafter


def _runner(published: Published) -> Callable[[Published], TrainableDrafter] | None:
    config, kind = published.config, published.config.get("speculators_model_type")
    readers = {"dflash": _dflash, "dspark": _dflash, "eagle3": _eagle3, "mtp": _mtp, "peagle": _eagle3}
    if kind is not None:
        return readers[published.allow("speculators_model_type", kind, tuple(readers))]
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return _medusa
    parts = {name.split(".")[0] for name in _tensors(published.folder, names_only=True)}
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or ()) or "midlayer" in parts:
        return _eagle3
    return _eagle if {"fc", "layers"} <= parts and "norm" not in parts else None


def _tensors(folder: Path, names_only: bool = False) -> dict[str, Any]:
    """The tensors of all of the folder's files by name; None in their place with `names_only`."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in list(tensors.keys()):
                    if name in found and not names_only:
                        raise ConfigError(f"drafter={folder}: tensor {name} is in two files; expected it in one")
                    found[name] = None if names_only else tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return found


def _words(tensor: Tensor) -> str:
    kind = "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
    return f"{kind} {list(tensor.shape)}"


def _eagle3(published: Published) -> Eagle3 | ParallelEagle:
    """EAGLE-3 in both layouts, and P-EAGLE, whose `mask_hidden` [1, 1, F] stands in for features; ours for a state."""
    config, kind = published.config, published.config.get("speculators_model_type")
    eagle_config, depth = published.part("eagle_config"), published.text.num_hidden_layers
    first = "layers.0." if kind else "midlayer."
    if not kind:  # outside of eagle_config engines do not agree about what an id means
        published.allow(LAYER_IDS, config.get(LAYER_IDS), (None,))
        published.allow("use_aux_hidden_state", eagle_config.get("use_aux_hidden_state", True), (True,))
    ids, shift = (config.get(LAYER_IDS), 0) if kind else (eagle_config.get(LAYER_IDS), 1)
    layers = published.layers(LAYER_IDS, *(([2, depth // 2, depth - 3],) if ids is None else (ids, shift)))
    body = published.body(published.part("transformer_layer_config") if kind else config, first)
    given = {"norm_before_residual": kind == "eagle3", **config, **eagle_config}
    options = {key: published.allow(key, given.get(key, False), (True, False)) for key in OPTIONS}
    V = body.vocab_size
    D = published.allow("draft_vocab_size", given.get("draft_vocab_size") or V, range(1, V + 1))
    sizes = {"draft_vocab_size": D if D < V or "d2t" in published.tensors else None}
    if kind == "peagle":
        mask_token = published.allow("mask_token_id", config.get("mask_token_id"), range(V))
        length = published.allow("speculative_tokens", published.draft_length(), POSITIVE)
        drafter = ParallelEagle(body, layers=layers, num_tokens=length, mask_token=mask_token, **sizes, **options)
        mask_11F = published.take("mask_hidden", f"float [1, 1, {len(layers) * body.hidden_size}]")
    else:
        drafter = Eagle3(body, layers=layers, **sizes, **options)
    published.fill(drafter.body, lambda name: name.removeprefix("vocabulary.").replace("layers.0.", first))
    published.sort_rows(drafter.body.vocabulary, [drafter.body.lm_head])
    if kind == "peagle":
        drafter.mask_hidden.copy_(drafter.body.project(mask_11F.flatten().float()))
    if D == V:
        drafter.body.vocabulary = None  # sorted rows of all tokens
    return drafter


def _eagle(published: Published) -> Eagle:
    """EAGLE-1, where `bias` is about fc."""
    drafter = Eagle(published.body(published.config))
    if published.config.get("bias") is not True:
        published.tensors.setdefault("fc.bias", torch.zeros(published.text.hidden_size))
    published.fill(drafter.body, lambda name: name)
    return drafter


def _mtp(published: Published) -> Mtp:
    """Where input_proj reads [embedding; state], other than in `Mtp`. The layers' config is the target's own."""
    published.allow("num_nextn_predict_layers", published.config.get("num_nextn_predict_layers", 1), (1,))
    drafter = Mtp(published.body(published.part("transformer_layer_config"), "mtp_layers.0.", num_hidden_layers=1))
    published.fill(drafter.body, lambda name: f"mtp_layers.0.{name.removeprefix('layers.0.')}")
    drafter.body.input_proj.weight.copy_(torch.cat(drafter.body.input_proj.weight.chunk(2, 1)[::-1], 1))
    return drafter


def _dflash(published: Published) -> DFlash:
    """DFlash and DSpark; masks have the embedding of `mask_token_id`, the target's or one of their own."""
    config, tensors = published.config, published.tensors
    body = published.body(published.part("transformer_layer_config"))
    # True: the anchor's place predicts as well, and each place its successor. DSpark's default.
    anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    published.allow("sample_from_anchor", anchored, (False,))
    published.allow("draft_vocab_size", config.get("draft_vocab_size") or body.vocab_size, (body.vocab_size,))
    published.allow("markov_head_type", config.get("markov_head_type", "vanilla"), ("vanilla",))
    for name in list(tensors):
        tensors[re.sub(r"^(markov_head|confidence_head)\.", "", name)] = tensors.pop(name)
    rank = tensors["markov_w1.weight"].shape[-1] if "markov_w1.weight" in tensors else 0
    rank = published.allow("markov_rank", config.get("markov_rank", rank), range(LARGE + 1))
    sure = tensors.get("proj.weight")
    if sure is not None and sure.shape == (1, body.hidden_size):
        tensors["proj.weight"] = nn.functional.pad(sure, (0, rank))  # it does not read the token before
    layers = published.layers("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"))
    size = published.allow("block_size", config.get("block_size"), POSITIVE[1:])
    sure = config.get("enable_confidence_head", sure is not None)
    # Anchors matter in training alone.
    drafter = DFlash(body, layers=layers, block_size=size, anchors=64, markov_rank=rank, confidence_head=sure)
    mask_token = published.allow("mask_token_id", config.get("mask_token_id"), range(body.vocab_size))
    tensors["mask_embedding"] = _mask_embedding(published, mask_token)
    published.fill(drafter, lambda name: re.sub(r"^(body|markov)\.", "", name).replace("confidence.", "proj."))
    return drafter


def _mask_embedding(published: Published, mask_token: int) -> Tensor:
    """[H]: of embeddings beside the drafter, which have to be the target's in all other rows, or of the target."""
    embeddings = published.target.get_input_embeddings()
    own_VH = embeddings.weight.detach().cpu()
    theirs_VH = published.tensors.get("embed_tokens.weight")
    if theirs_VH is None or theirs_VH.shape != own_VH.shape:
        published.drop_shared("embed_tokens.weight", embeddings)
        return own_VH[mask_token]
    mask_H = theirs_VH[mask_token].clone()
    theirs_VH[mask_token] = own_VH[mask_token].to(theirs_VH.dtype)
    published.drop_shared("embed_tokens.weight", embeddings)
    return mask_H


def _medusa(published: Published) -> Medusa:
    """vLLM's layout, or where no tensor is called `blocks.*` the original one."""
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
