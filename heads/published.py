"""Drafters as other projects publish them: EAGLE-1, EAGLE-3, P-EAGLE, DFlash, DSpark, MTP and Medusa.

`config.json` and the names of the tensors tell a folder's layout; of weights only safetensors are read. Layouts count the
target's layers in two ways: speculators' id k is transformers' `hidden_states[k]`, as in `Needs.layers`; SGLang's is the
output of block k, which is `hidden_states[k + 1]`.
"""

import re
import sys
from collections.abc import Callable, Container
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
from draftsmith.heads.dflash import DFlash
from draftsmith.heads.drafter import TrainableDrafter
from draftsmith.heads.eagle import Eagle
from draftsmith.heads.eagle3 import OPTIONS, Eagle3, Eagle3Body
from draftsmith.heads.medusa import Medusa
from draftsmith.heads.mtp import Mtp
from draftsmith.heads.parallel_eagle import ParallelEagle
from draftsmith.heads.vocabulary import DraftVocabulary

# Shapes: H hidden size, V target vocabulary, D draft vocabulary, F features.

LLAMA_LIKE = ("llama", "qwen2", "qwen3")
"""Model types whose layers are Llama's but for what shows in their tensors: biases, norms of heads."""
POSITIVE = range(1, sys.maxsize)
FLAGS = (True, False)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass
class Published:
    """A folder whose layout was recognised, and the target that it is to fit."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: nn.Module

    def __post_init__(self) -> None:
        self.text = self.target.config.get_text_config(decoder=True)

    def refusal(self, found: str, expected: str) -> ConfigError:
        return ConfigError(f"drafter={self.folder}: {found}; expected {expected}")

    def allow(self, key: str, found: Any, allowed: Container) -> Any:
        """`found`, which config.json says of `key`; ConfigError unless it is one of `allowed`."""
        whole = isinstance(allowed, range)
        if found not in allowed or (whole and type(found) is not int):
            expected = (
                f"an integer in {allowed.start} to {allowed.stop - 1}" if whole else " or ".join(map(repr, allowed))
            )
            raise self.refusal(
                f"{key}={found!r} in config.json", "an integer >= 1" if allowed is POSITIVE else expected
            )
        return found

    def part(self, key: str) -> dict[str, Any]:
        """A mapping in config.json; empty where there is none."""
        if not isinstance(self.config.get(key, {}), dict):
            raise self.refusal(f"{key}={self.config[key]!r} in config.json", "a mapping")
        return self.config.get(key, {})

    def layers(self, key: str, ids: Any, shift: int = 0) -> tuple[int, ...]:
        """Layers as `Needs.layers` counts them, which is `shift` more than the layout."""
        valid = range(1 - shift, self.text.num_hidden_layers + 1 - shift)
        if not isinstance(ids, list) or not ids:
            raise self.refusal(f"{key}={ids!r} in config.json", "a list of the target's layers")
        return tuple(self.allow(key, k, valid) + shift for k in ids)

    def draft_length(self) -> int | None:
        methods = self.part("speculators_config").get("proposal_methods")
        length = methods[0].get("speculative_tokens") if methods else None
        return None if length is None else self.allow("speculative_tokens", length, POSITIVE)

    def body(self, fields: dict[str, Any], first: str = "layers.0.", **changes: int) -> LlamaConfig:
        """The drafter's layers, of which `first` is the first. `fields` leave out what their model type has anyway."""
        kind = self.allow("model_type", fields.get("model_type", "llama"), LLAMA_LIKE)
        try:
            theirs = AutoConfig.for_model(**{**fields, "model_type": kind})
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise self.refusal(
                f"config.json's layers ({' '.join(str(error).split())})", f"those of a {kind}"
            ) from error
        rope, heads = theirs.rope_parameters, theirs.num_attention_heads
        self.allow("hidden_size", theirs.hidden_size, (self.text.hidden_size,))
        self.allow("target_hidden_size", self.config.get("target_hidden_size"), (None, self.text.hidden_size))
        self.allow("vocab_size", theirs.vocab_size, (self.text.vocab_size,))
        self.allow("rope_type", rope["rope_type"], ("default", *ROPE_INIT_FUNCTIONS))
        self.allow("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,))
        self.allow("layer_types", set(getattr(theirs, "layer_types", None) or ()), (set(), {"full_attention"}))
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        self.allow("num_key_value_heads", theirs.num_key_value_heads, divisors)
        same = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings")
        same += ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act")
        values = {
            **{key: getattr(theirs, key) for key in same},
            "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
            "rope_parameters": rope,
            "attention_bias": getattr(theirs, "attention_bias", False)
            or f"{first}self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": getattr(theirs, "mlp_bias", False),
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return LlamaConfig(**{**values, **changes})

    def drop_shared(self, name: str, part: nn.Module) -> None:
        """Leave out a tensor that is the target's own; ConfigError where it is another."""
        theirs, own = self.tensors.pop(name, None), part.weight.detach().cpu()
        if theirs is None or (
            theirs.shape == own.shape
            and (
                # In the coarser dtype of the two, whichever that is.
                torch.equal(theirs.to(own.dtype), own) or torch.equal(own.to(theirs.dtype), theirs)
            )
        ):
            return
        what = "embeddings" if name.startswith("embed") else "an lm_head"
        found = f"tensor {name} {list(theirs.shape)} differs from the target's {list(own.shape)}"
        raise self.refusal(found, f"the same: drafters of this kind with {what} of their own are not supported")

    def fill(self, module: nn.Module, published: Callable[[str], str]) -> None:
        """Load `module`, whose tensor x is called `published(x)` here: all that it has, and nothing may be left."""
        state = {published(name): (name, value) for name, value in module.state_dict().items()}
        for name, (_, value) in state.items():
            found, wanted = self.tensors.get(name), _words(value)
            if found is None:
                raise self.refusal(f"no tensor {name}", wanted)
            if _words(found) != wanted:
                raise self.refusal(f"tensor {name} is {_words(found)}", wanted)
        for name in sorted(self.tensors.keys() - state.keys()):
            if "rotary_emb." not in name:
                raise self.refusal(f"unexpected tensor {name}, {_words(self.tensors[name])}", f"{len(state)} others")
        module.load_state_dict({name: self.tensors[theirs] for theirs, (name, _) in state.items()})

    def sort_rows(self, vocabulary: DraftVocabulary | None, heads: list[nn.Linear]) -> None:
        """Bring rows into the order of their tokens."""
        if vocabulary is not None:
            tokens_D, order_D = vocabulary.tokens_D.sort()
            vocabulary.d2t.copy_(tokens_D - torch.arange(len(tokens_D)))
            for head in heads:
                head.weight.copy_(head.weight[order_D])
            vocabulary.require_consistent(self.folder)


def read_published(folder: Path, config: dict[str, Any], target: nn.Module) -> TrainableDrafter | None:
    """The drafter in `folder`, not attached yet; None where the folder has the layout of none.

    Raises:
        ConfigError: for one that is damaged, of another target, or of a kind that the drafters here cannot express.
    """
    read = _reader(folder, config)
    if read is None:
        return None
    published = Published(folder, config, _tensors(folder), target)
    if not published.tensors:
        raise published.refusal("no *.safetensors", "weights in such files; pickled ones are not read")
    published.allow("logit_scale", config.get("logit_scale", 1.0), (1.0,))
    if read is not _medusa:
        published.drop_shared("embed_tokens.weight", target.get_input_embeddings())
    if read in (_eagle, _mtp, _dflash):
        published.drop_shared("lm_head.weight", target.get_output_embeddings())
    with torch.no_grad():
        drafter = read(published)
    length, most = published.draft_length(), drafter.max_draft_length
    if length is not None and most is not None:
        published.allow("speculative_tokens", length, range(1, most + 1))
    drafter.draft_length_hint = length
    return drafter


def _reader(folder: Path, config: dict[str, Any]) -> Callable[[Published], TrainableDrafter] | None:
    kind = config.get("speculators_model_type")
    if kind is not None:
        readers = {"eagle3": _eagle3, "peagle": _eagle3, "dflash": _dflash, "dspark": _dflash, "mtp": _mtp}
        if kind not in readers:
            found = f"drafter={folder}: speculators_model_type={kind!r} in config.json"
            raise ConfigError(f"{found}; expected one of {', '.join(readers)}")
        return readers[kind]
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return _medusa
    names = _tensors(folder, names_only=True)
    flat = "LlamaForCausalLMEagle3" in (config.get("architectures") or ())
    if flat or any(name.startswith("midlayer.") for name in names):
        return _eagle3
    layers = any(name.startswith("layers.0.") for name in names)
    return _eagle if "fc.weight" in names and layers and "norm.weight" not in names else None


def _tensors(folder: Path, names_only: bool = False) -> dict[str, Any]:
    """The tensors of all of the folder's files by name; None in their place with `names_only`."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                part = {name: None if names_only else tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
        for name in sorted(found.keys() & part.keys()):
            raise ConfigError(f"drafter={folder}: tensor {name} stands in two files; expected it in one")
        found |= part
    return found


def _words(tensor: Tensor) -> str:
    kind = "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
    return f"{kind} {list(tensor.shape)}"


def _eagle3(published: Published) -> Eagle3 | ParallelEagle:
    """EAGLE-3 in both layouts, and P-EAGLE, whose `mask_hidden` [1, 1, F] stands in for features; ours for a state."""
    config, tensors, kind = published.config, published.tensors, published.config.get("speculators_model_type")
    eagle_config, depth = published.part("eagle_config"), published.text.num_hidden_layers
    first = "layers.0." if kind else "midlayer."
    if not kind:  # outside of eagle_config engines do not agree about what an id means
        published.allow(LAYER_IDS, config.get(LAYER_IDS), (None,))
        published.allow("use_aux_hidden_state", eagle_config.get("use_aux_hidden_state", True), (True,))
    ids, shift = (config.get(LAYER_IDS), 0) if kind else (eagle_config.get(LAYER_IDS), 1)
    default = [2, depth // 2, depth - 3]
    layers = published.layers(LAYER_IDS, default) if ids is None else published.layers(LAYER_IDS, ids, shift)
    body = published.body(published.part("transformer_layer_config") if kind else config, first)
    given = {"norm_before_residual": kind == "eagle3", **config, **eagle_config}
    options = {key: published.allow(key, given.get(key, False), FLAGS) for key in OPTIONS}
    size = given.get("draft_vocab_size") or body.vocab_size
    size = published.allow("draft_vocab_size", size, range(1, body.vocab_size + 1))
    if size == body.vocab_size and "d2t" in tensors and not tensors["d2t"].any():
        del tensors["d2t"]  # every token to itself; so says the mask
        tensors.pop("t2d", None)
    sizes = {"layers": layers, "draft_vocab_size": None if size == body.vocab_size else size}
    if kind != "peagle":
        drafter = Eagle3(body, **sizes, **options)
    else:
        mask_token = published.allow("mask_token_id", config.get("mask_token_id"), range(body.vocab_size))
        length = published.allow("speculative_tokens", published.draft_length(), POSITIVE)
        drafter = ParallelEagle(body, **sizes, num_tokens=length, mask_token=mask_token)
        drafter.body = Eagle3Body(body, len(layers), draft_vocab_size=sizes["draft_vocab_size"], **options)
        mask, wanted = tensors.pop("mask_hidden", None), f"float [1, 1, {len(layers) * body.hidden_size}]"
        if mask is None or _words(mask) != wanted:
            raise published.refusal(
                "no tensor mask_hidden" if mask is None else f"mask_hidden is {_words(mask)}", wanted
            )
    published.fill(drafter.body, lambda name: name.removeprefix("vocabulary.").replace("layers.0.", first))
    published.sort_rows(drafter.body.vocabulary, [drafter.body.lm_head])
    if kind == "peagle":
        drafter.mask_hidden.copy_(drafter.body.project(mask.flatten().float()))
    return drafter


def _eagle(published: Published) -> Eagle:
    """EAGLE-1, where `bias` is about fc."""
    drafter = Eagle(published.body(published.config))
    if published.config.get("bias") is not True:
        published.tensors.setdefault("fc.bias", torch.zeros(published.text.hidden_size))
    published.fill(drafter.body, lambda name: name)
    return drafter


def _mtp(published: Published) -> Mtp:
    """Where input_proj reads [state; embedding]. The layers' config is the target's own."""
    published.allow("num_nextn_predict_layers", published.config.get("num_nextn_predict_layers", 1), (1,))
    fields = {**published.part("transformer_layer_config")}
    drafter = Mtp(published.body(fields, "mtp_layers.0.", num_hidden_layers=1))
    published.fill(drafter.body, lambda name: f"mtp_layers.0.{name.removeprefix('layers.0.')}")
    return drafter


def _dflash(published: Published) -> DFlash:
    """DFlash and DSpark; masks have the embedding of `mask_token_id`."""
    config, tensors = published.config, published.tensors
    body = published.body(published.part("transformer_layer_config"))
    # True: the anchor's place predicts as well, and each place its successor. DSpark's default.
    anchored = config.get("sample_from_anchor", config["speculators_model_type"] == "dspark")
    published.allow("sample_from_anchor", anchored, (False,))
    published.allow("draft_vocab_size", config.get("draft_vocab_size", body.vocab_size), (body.vocab_size,))
    published.allow("markov_head_type", config.get("markov_head_type", "vanilla"), ("vanilla",))
    for name in list(tensors):
        tensors[re.sub(r"^(markov_head|confidence_head)\.", "", name)] = tensors.pop(name)
    rank = config.get("markov_rank", tensors["markov_w1.weight"].shape[-1] if "markov_w1.weight" in tensors else 0)
    sure = tensors.get("proj.weight")
    if sure is not None and rank and sure.shape == (1, body.hidden_size):
        tensors["proj.weight"] = nn.functional.pad(sure, (0, rank))  # it does not read the token before
    drafter = DFlash(
        body,
        layers=published.layers("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids")),
        block_size=published.allow("block_size", config.get("block_size"), range(2, sys.maxsize)),
        anchors=64,  # matters in training alone
        markov_rank=published.allow("markov_rank", rank, range(sys.maxsize)),
        confidence_head=config.get("enable_confidence_head", sure is not None),
    )
    mask_token = published.allow("mask_token_id", config.get("mask_token_id"), range(body.vocab_size))
    tensors["mask_embedding"] = published.target.get_input_embeddings().weight[mask_token].detach().cpu()
    published.fill(drafter, lambda name: re.sub(r"^(body|markov)\.", "", name).replace("confidence.", "proj."))
    return drafter


def _medusa(published: Published) -> Medusa:
    """vLLM's layout, or where no tensor is called `blocks.*` the original one."""
    config, text = published.config, published.text
    published.tensors = {name.removeprefix("medusa_heads."): value for name, value in published.tensors.items()}
    tensors, (H, V) = published.tensors, (text.hidden_size, text.vocab_size)
    published.allow("hidden_size", config.get("hidden_size", H), (H,))
    published.allow("vocab_size", config.get("vocab_size", V), (V,))
    heads = published.allow("num_heads", config.get("medusa_num_heads", config.get("num_heads")), POSITIVE)
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    layers = published.allow("num_hidden_layers", layers, POSITIVE)
    if not any(name.startswith("blocks.") for name in tensors):
        drafter = Medusa(H, V, heads, layers)
        own = re.compile(r"^lm_heads\.(\d+)\.")
        published.fill(drafter, lambda name: own.sub(rf"\1.{layers}.", name.removeprefix("blocks.")))
        return drafter
    if not config.get("medusa_fc_bias", any(name.endswith(".bias") for name in tensors)):
        for name in [f"blocks.{head}.layers.{layer}.bias" for head in range(heads) for layer in range(layers)]:
            if name in tensors:
                raise published.refusal(f"unexpected tensor {name}", "none with medusa_fc_bias=False in config.json")
            tensors[name] = torch.zeros(H)
    size = published.allow("truncated_vocab_size", config.get("truncated_vocab_size") or V, range(1, V + 1))
    if size < V:
        _token_map(published, size, V)
    shared = bool(config.get("original_lm_head"))
    drafter = Medusa(H, V, heads, layers, shared, size if size < V else None)
    own = re.compile(r"^(blocks\.\d+)\.(\d+)\.linear\.")
    published.fill(drafter, lambda name: own.sub(r"\1.layers.\2.", name))
    published.sort_rows(drafter.draft_vocabulary, [drafter.lm_heads[k] for k in range(1 if shared else heads)])
    return drafter


def _token_map(published: Published, size: int, vocab_size: int) -> None:
    """`token_map` [D], the token of each row, as offsets and mask; of an lm_head that knows all tokens, those rows."""
    tensors = published.tensors
    map_D = tensors.pop("token_map", None)
    if map_D is None or _words(map_D) != f"int [{size}]":
        found = "no tensor token_map" if map_D is None else f"tensor token_map is {_words(map_D)}"
        raise published.refusal(found, f"int [{size}], as truncated_vocab_size says")
    if len(map_D.unique()) < size or map_D.min() < 0 or map_D.max() >= vocab_size:
        raise published.refusal("tensor token_map has repeated or unknown tokens", f"distinct ids below {vocab_size}")
    tensors["lm_heads.vocabulary.d2t"] = map_D.long() - torch.arange(size)
    tensors["lm_heads.vocabulary.t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, map_D.long(), True)
    for name, value in tensors.items():
        if re.fullmatch(r"lm_heads\.\d+\.weight", name) and value.shape[0] == vocab_size:
            tensors[name] = value[map_D.long()]
