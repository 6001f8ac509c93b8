"""Drafter folders of other projects: checked access to config.json and tensors; only safetensors weights are read.

Layouts count the target's layers in two ways: the id k of vLLM's speculators is transformers' `hidden_states[k]`, as in
`Needs.layers`; SGLang's id k is the output of block k, counted from 0, which is `hidden_states[k + 1]`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftsmith.errors import ConfigError
from draftsmith.heads.formats.common import scales_embeddings
from draftsmith.heads.layers import LayerConfig, windows_of
from draftsmith.heads.lm_head import DraftVocabulary, weight_of
from draftsmith.heads.untrusted import require_finite

# Shapes: H hidden size, V target vocabulary, D draft vocabulary, F features.

LLAMA_LIKE = ("llama", "qwen2", "qwen3")
"""Model types whose layers are Llama's, apart from biases and norms of heads, which their tensors show."""
KEPT = ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "hidden_act")
KEPT += ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "attention_bias")
KEPT += ("mlp_bias",)
ROTATION = ("rope_theta", "rope_scaling")
WINDOWS = ("layer_types", "sliding_window")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LARGE = 2**40
POSITIVE = range(1, LARGE + 1)


class Recorded(dict[str, Any]):
    """A mapping of config.json, with the set of the keys that are read from it."""

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        super().__init__(values)
        self.read = set[str]() if read is None else read

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.read.add(key)
        return super().get(key, default)


PARTS = ("transformer_layer_config", "speculators_config", "eagle_config", "dflash_config")
"""Mappings in config.json of which readers read keys."""
UNUSED = {"torch_dtype", "auto_map", "quantization_config", "tie_word_embeddings", "use_cache", "bos_token_id"}
UNUSED |= {"eos_token_id", "pad_token_id", "base_model_name_or_path", "use_sliding_window", "embed_requires_grad"}
UNUSED |= {"algorithm", "default_proposal_method", "verifier", "speculators_version", "confidence_head_with_markov"}
UNUSED |= {"num_anchors", "draft_num_hidden_layers", "attention_dropout"}
UNUSED |= {"initializer_range", *PARTS}
"""Keys that change no number of a drafter, besides those of every transformers config."""
MOST_NAMED = 12


def unknown_keys(config: Mapping[str, Any], read: Collection[str] = ()) -> tuple[str, ...]:
    """Return the keys of a config.json that are neither in `read` nor known to transformers; the first `MOST_NAMED`.

    transformers knows the keys of every config, and those of the model type that is named.
    """
    known = {*read, *UNUSED, *ROTATION, *PreTrainedConfig().to_dict(), *GenerationConfig().to_dict()}
    names: list[str] = []
    for name in ("", *PARTS):
        part = config if not name else config.get(name)
        kind = part.get("model_type", "llama") if isinstance(part, dict) else None
        own = CONFIG_MAPPING[kind]() if isinstance(kind, str) and kind in CONFIG_MAPPING else PreTrainedConfig()
        keys = known | {*own.to_dict(), *own.attribute_map}
        names += [f"{name}.{key}".strip(".") for key in (part if isinstance(part, dict) else ()) if key not in keys]
    rest = [] if len(names) <= MOST_NAMED else [f"{len(names) - MOST_NAMED} others"]
    return (*names[:MOST_NAMED], *rest)


@dataclass(eq=False)
class Published:
    """A folder with a recognised layout, and the target that the drafter must fit, with its text config."""

    folder: Path
    config: Recorded
    tensors: dict[str, Tensor]
    """The tensors that have not been read yet."""
    target: PreTrainedModel
    text: PreTrainedConfig
    shared: list[str] = field(default_factory=list)
    """The tensors that were skipped because they are the target's."""
    unstated: list[str] = field(default_factory=list)
    """Missing keys that change what a drafter computes and that engines replace by different values."""

    def refusal(self, problem: str, expected: str) -> ConfigError:
        """Return the error for a drafter that cannot be read."""
        return ConfigError(f"drafter={self.folder}: {problem}; expected {expected}")

    def allow(self, key: str, value: Any, allowed: range | tuple[Any, ...]) -> Any:
        """Return `value`, the value of `key` in config.json; raise ConfigError unless it is one of `allowed`."""
        whole = isinstance(allowed, range)
        if (whole and type(value) is not int) or value not in allowed:  # `in` iterates a range for other types than int
            words = f"an integer, {allowed[0]} to {allowed[-1]}" if whole else ", ".join(map(str, allowed))
            expected = words.replace(f" to {LARGE}", " or more") if whole or len(allowed) < 2 else f"one of {words}"
            raise self.refusal(f"{key}={value!r} in config.json", expected)
        return value

    def stated(self, key: str, value: Any, assumed: bool) -> bool:
        """Return `value`, a boolean of config.json; where it is missing, note that and return `assumed`."""
        if value is None:
            self.unstated.append(key)
            return assumed
        return self.allow(key, value, (True, False))

    def part(self, key: str) -> Recorded:
        """Return a mapping in config.json; empty where the key is missing."""
        part = self.config.get(key) or {}
        if not isinstance(part, dict):
            raise self.refusal(f"{key}={part!r} in config.json", "a mapping")
        return self.merged(part)

    def merged(self, *parts: Mapping[str, Any]) -> Recorded:
        """Return mappings of config.json as one, in which later ones win."""
        return Recorded({key: value for part in parts for key, value in part.items()}, self.config.read)

    def layers(self, key: str, ids: Any, shift: int = 0) -> tuple[int, ...]:
        """Return layers as counted in `Needs.layers`, which is `shift` more than in the layout."""
        first, last = 1 - shift, self.text.num_hidden_layers - shift
        if not isinstance(ids, list) or not ids or not all(type(k) is int and first <= k <= last for k in ids):
            raise self.refusal(f"{key}={ids!r}", f"a list of the target's layers, {first} to {last}")
        return tuple(k + shift for k in ids)

    def draft_length(self, most: int = LARGE) -> int | None:
        """Return the draft length of the first proposal method, None without one; raise ConfigError above `most`."""
        methods = self.part("speculators_config").get("proposal_methods") or [{}]
        if not isinstance(methods, list) or not isinstance(methods[0], dict):
            raise self.refusal(f"proposal_methods={methods!r} in config.json", "a list of mappings")
        length = methods[0].get("speculative_tokens")
        return None if length is None else self.allow("speculative_tokens", length, range(1, most + 1))

    def body(self, fields: dict[str, Any], first: str = "layers.0.", **changes: Any) -> LlamaConfig:
        """Return the config of the drafter's layers from its stored `fields`, with defaults of their model type.

        Args:
            first: prefix of the first layer's tensors.
            changes: values that replace stored ones.
        """
        self.config.read.update(KEPT, WINDOWS)
        kind = self.allow("model_type", fields.get("model_type", "llama"), LLAMA_LIKE)
        scaling = fields.get("rope_scaling") or fields.get("rope_parameters")
        if isinstance(scaling, dict) and "mrope" in (scaling.get("type"), scaling.get("rope_type")):
            # Positions of images; those of text are equal in all sections, which is the default rotation.
            plain = {"rope_type": "default", "rope_theta": scaling.get("rope_theta", fields.get("rope_theta", 1e4))}
            fields = {**fields, "rope_scaling": None, "rope_parameters": plain}
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
        kinds = getattr(theirs, "layer_types", None) or ()
        if "sliding_attention" in kinds:
            changes |= {"layer_types": kinds, "sliding_window": getattr(theirs, "sliding_window", None)}
        divisors = tuple(n for n in range(1, heads + 1) if heads % n == 0)
        self.allow("num_key_value_heads", theirs.num_key_value_heads, divisors)
        if f"{first}self_attn.q_proj.bias" in self.tensors:
            changes["attention_bias"] = True
        values = {key: getattr(theirs, key) for key in KEPT if hasattr(theirs, key)}
        body = LayerConfig(**{**values, "bos_token_id": None, "eos_token_id": None, **changes})
        try:
            windows = windows_of(body)
        except ConfigError as error:
            raise self.refusal(f"the layers in config.json ({error})", "full or sliding attention") from error
        most = range(1, body.max_position_embeddings + 1)
        for window in {size for size in windows if size is not None}:
            self.allow("sliding_window", window, most)
        return body

    def dropped(self, name: str, part: nn.Module | None) -> bool:
        """Skip a tensor that equals the weight of the target's `part` in any dtype, and return whether it does."""
        own = weight_of(part).detach()
        theirs = self.tensors.get(name, own)
        same = own.is_meta and theirs.shape == own.shape
        same = same or any(torch.equal(theirs.to(dtype), own.cpu().to(dtype)) for dtype in (own.dtype, theirs.dtype))
        if same and self.tensors.pop(name, None) is not None:
            self.shared.append(name)
        return same

    def drop_shared(self, name: str, part: nn.Module | None) -> None:
        """Skip a tensor that equals the weight of the target's `part` in any dtype; raise ConfigError if it differs."""
        if not self.dropped(name, part):
            own, theirs = weight_of(part), self.tensors[name]
            what = "embeddings" if "embed" in name else "an lm_head"
            problem = f"tensor {name} {list(theirs.shape)} is not the target's {list(own.shape)}"
            raise self.refusal(problem, f"the same: drafters of this kind with {what} of their own are not supported")

    def require_plain_embeddings(self) -> None:
        """Raise ConfigError for a target that scales its embeddings, in a layout whose engines read plain rows."""
        if scales_embeddings(self.target):
            raise self.refusal("the target scales its embeddings", "one that does not: engines read plain ones here")

    def drop_zero_biases(self) -> None:
        """Skip output biases of attention that are zero; engines require them where the inputs have biases."""
        for name in [name for name in self.tensors if name.endswith("self_attn.o_proj.bias")]:
            if not self.tensors[name].any():
                del self.tensors[name]

    def take(self, name: str, wanted: str) -> Tensor:
        """Remove and return an unread tensor; raise ConfigError unless its kind and shape are `wanted`."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise self.refusal(f"no tensor {name}", wanted)
        if _kind_and_shape(tensor) != wanted:
            raise self.refusal(f"tensor {name} is {_kind_and_shape(tensor)}", wanted)
        return tensor

    def fill(self, module: nn.Module, published: Callable[[str], str]) -> None:
        """Load `module` from all unread tensors, of which `published(x)` is the module's tensor x.

        A `t2d` that is missing, as in Model-Optimizer's files, follows from `d2t`.
        """
        state = module.state_dict()
        shapes = {name: _kind_and_shape(value) for name, value in state.items()}
        for name in shapes:
            d2t_D = self.tensors.get(published(name.removesuffix("t2d") + "d2t"))
            if name.endswith("t2d") and published(name) not in self.tensors and d2t_D is not None:
                tokens_D = d2t_D + torch.arange(len(d2t_D)) if d2t_D.ndim == 1 else d2t_D
                self.tensors[published(name)] = torch.isin(torch.arange(len(state[name])), tokens_D)
        module.load_state_dict({name: self.take(published(name), wanted) for name, wanted in shapes.items()})
        for name in sorted(name for name in self.tensors if "rotary_emb." not in name):
            raise self.refusal(f"unexpected tensor {name} {list(self.tensors[name].shape)}", "none of that name")

    def sort_rows(self, vocabulary: DraftVocabulary | None, heads: list[nn.Linear]) -> None:
        """Sort the rows of lm_heads, and the draft vocabulary, by token."""
        if vocabulary is not None:
            tokens_D, order_D = vocabulary.tokens_D.sort()
            vocabulary.d2t.copy_(tokens_D - torch.arange(len(tokens_D)))
            for head in heads:
                head.weight.copy_(head.weight[order_D])
            vocabulary.require_consistent(self.folder)


def read_tensors(folder: Path, names_only: bool = False) -> dict[str, Any]:
    """Return the tensors of all files of the folder by name; with `names_only` the values are None."""
    read: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in list(tensors.keys()):
                    if name in read and not names_only:
                        raise ConfigError(f"drafter={folder}: tensor {name} is in two files; expected it in one")
                    read[name] = None if names_only else tensors.get_tensor(name)
                    require_finite(folder, [] if names_only else [(name, read[name])])
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return read


def _kind_and_shape(tensor: Tensor) -> str:
    """Return the words for a tensor in errors: `float [32, 64]`."""
    kind = "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"
    return f"{kind} {list(tensor.shape)}"
