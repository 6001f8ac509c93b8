"""Values of a transformers model's config that architectures store in different ways; its attention implementation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import index
from re import compile as pattern
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.errors import ConfigError


def has_data(values: Tensor | nn.Module) -> bool:
    """Return whether a tensor, or a module's first weight, has data; the memory estimate runs on tensors without."""
    first = values if isinstance(values, Tensor) else next(values.parameters())
    return not isinstance(first, FakeTensor)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config of the model's text decoder, which for most models is the model's config."""
    return model.config.get_text_config(decoder=True)


def vocabulary_of(config: PreTrainedConfig) -> int:
    """Return the number of token ids that a model of this config reads."""
    return config.get_text_config(decoder=True).vocab_size


def known_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number after the last id of a tokenizer; models pad their vocabulary, and may sample larger ids."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def layer_value(config: PreTrainedConfig, name: str, layer: int = 0) -> Any:
    """Return a config's value for one layer, None if it has none; layers of Gemma 3n and 4 differ."""
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    value = getattr(config, name, None)
    return value[layer] if isinstance(value, list | tuple) else value


def context_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a model of this config can read; None when the config states no limit.

    YaRN, linear and dynamic scaling read `factor` times the original positions, and `max_position_embeddings` may state
    fewer: users enable them in a config whose other values stay. Types with values by type of layer (Gemma 3) state the
    whole context.
    """
    if getattr(config, "relative_attention_num_buckets", None):
        return None  # relative positions: T5's n_positions is the length that it was trained with, not a limit
    decoder = config.get_text_config(decoder=True)
    for key in ("max_position_embeddings", "n_positions"):
        limit = getattr(decoder, key, None)
        if limit and limit > 0:  # -1: none
            whole, *by_layer = _rotary(config)
            scaled = [whole] if whole.get("rope_type") in ("yarn", "linear", DYNAMIC) else []
            scaled += [rope for rope in by_layer if rope.get("rope_type") == "yarn"]
            lengths = [
                (rope.get("original_max_position_embeddings") or limit, rope.get("factor") or 1) for rope in scaled
            ]
            return int(max([limit, *(original * factor for original, factor in lengths)]))
    return None


DYNAMIC = "dynamic"
"""Type of rotary embeddings whose frequencies depend on the length of each text beyond the original context."""


def decoding_limit(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that decoded texts may have; None when the config states no limit.

    With dynamic scaling it is the original context: beyond it each new token changes the frequencies of all others.
    """
    return rotary_switch(config) if is_dynamic(config) else context_limit(config)


def is_dynamic(config: PreTrainedConfig) -> bool:
    """Return whether texts reach beyond the original context by dynamic scaling."""
    return _rotary(config)[0].get("rope_type") == DYNAMIC and rotary_switch(config) is not None


def _rotary(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings: one entry, or one for each type of layer."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def rotary_switch(config: PreTrainedConfig) -> int | None:
    """Return the number of positions beyond which a model's rotary frequencies are others (longrope, dynamic), or None.

    A pass that reads a later position computes all its tokens with the frequencies of long texts, to which keys that
    were cached before do not belong. transformers' `generate` therefore reads the text again there.
    """
    limit, kinds = context_limit(config), _rotary(config)
    lengths = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    if kinds[0].get("rope_type") == DYNAMIC:
        lengths.append(config.get_text_config(decoder=True).max_position_embeddings)
    switch = min(lengths, default=None)
    return None if switch is None or (limit is not None and limit <= switch) else int(switch)


NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
ROTARY_NAMES = {"gpt_neox": NEOX, "gpt_neox_japanese": NEOX}
"""Names of rotary values in transformers 4 by model type, where they are others than most types have."""
ROTARY_BY_LAYER = {"gemma3_text": "rope_local_base_freq", "gemma3n_text": "rope_local_base_freq", "olmo3": "rope_theta"}
"""Model types with rotary values by type of layer, and the name in transformers 4 of the base of windowed layers."""


def with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with each dtype and rotary value under its name in transformers 4, too.

    transformers 5 writes `dtype` and `rope_parameters` alone. transformers 4, mlx-lm and older engines do not read
    these: they rotate by base 10,000, without scaling.
    """
    named = config | ({"torch_dtype": config["dtype"]} if isinstance(config.get("dtype"), str) else {})
    for key, value in config.items():
        if isinstance(value, dict) and "rope_parameters" in value:
            named[key] = with_older_names(value)
    rope, kind = config.get("rope_parameters") or {}, str(config.get("model_type"))
    values: dict[str, Any] = {}
    if any(isinstance(value, dict) for value in rope.values()):
        if kind not in ROTARY_BY_LAYER:
            return named  # a newer type, which transformers 4 does not have
        values[ROTARY_BY_LAYER[kind]] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if not rope:
        return named
    scaling = {**rope}
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in scaling:
            values[ROTARY_NAMES.get(kind, {}).get(key, key)] = scaling.pop(key)
    if scaling.get("rope_type") == "longrope" and "original_max_position_embeddings" in config:  # as Phi-3 reads it
        scaling = {"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    return named | values | ({} if scaling == {"rope_type": "default"} else {"rope_scaling": scaling})


def start_token(model: PreTrainedModel) -> int:
    """Return the first token of an encoder-decoder model's decoder; ConfigError when its configs name none."""
    for config in (getattr(model, "generation_config", None), model.config):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    raise ConfigError("decoder_start_token_id=None; expected the config of the encoder-decoder target to name one")


def eos_tokens(config: PreTrainedConfig, generation: Any = None) -> frozenset[int]:
    """Return the EOS tokens of a model's generation config or, if it names none, of its config."""
    for each in (generation, config, config.get_text_config(decoder=True)):
        ends = getattr(each, "eos_token_id", None)
        if ends is not None:
            return token_set(ends)
    return frozenset()


def token_set(tokens: Any) -> frozenset[int]:
    """Return the tokens in an integer, or in a list, set, tensor or array of integers; ConfigError for others."""
    values = tokens.flatten().tolist() if hasattr(tokens, "flatten") else tokens
    try:
        return frozenset(map(index, values if isinstance(values, Iterable) else [values]))
    except TypeError:
        raise ConfigError.of("eos_token_id", tokens, "a token, or several") from None


_NAME = "_attn_implementation_internal"
"""The attribute of a config that transformers sets; `_attn_implementation` would set those of nested configs too."""
_LOCK = RLock()
SPECIAL_ATTENTION = ("position_bias", "softcap", "s_aux")
"""Arguments that transformers gives to the attention of layers that compute more than a masked softmax."""


def configs_of(model: PreTrainedModel, name: str) -> list[PreTrainedConfig]:
    """Return the configs of all modules with the attention implementation `name`.

    A model that shares layers with another, as for early exit, has a config of its own beside that of its layers.
    """
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in configs.values() if getattr(config, "_attn_implementation", None) == name]


@contextmanager
def implementation(configs: Sequence[dict[str, Any]], name: str) -> Iterator[None]:
    """Let the layers with these configs use the attention implementation `name`.

    `configs`: their attributes: without the checks of a config's `setattr`, which cost more than the rest.
    """
    with _LOCK:
        before = [config[_NAME] for config in configs]
        for config in configs:
            config[_NAME] = name
        try:
            yield
        finally:
            for config, own in zip(configs, before, strict=True):
                config[_NAME] = own


_OF_LAYER = pattern(r"\.\d+\.")
STANCE = RLock()
"""Held while torch.compile's stance is changed, which applies to all threads."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Numbers of experts in configs."""
NO_CONTEXT = nullcontext()


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model itself, also of `torch.compile(model)`."""
    return getattr(model, "_orig_mod", model)


def require_in_memory(model: PreTrainedModel, *, layers: bool = False) -> None:
    """Raise ConfigError for a model whose weights outside of its layers, or with `layers` any, have no data.

    accelerate (`device_map`, `cpu_offload`) keeps weights on disk or in the host's memory, and copies those of a module
    while it runs. The decoder runs layers in this way, and drafters share or copy the other weights.
    """
    for name, weight in model.named_parameters():
        if weight.is_meta and (layers or not _OF_LAYER.search(name)):
            parts = "all weights" if layers else "its embeddings, norms and lm_head"
            raise ConfigError(f"target weight {name} is offloaded or on disk (device_map); expected {parts} in memory")


def is_compiled(model: nn.Module) -> bool:
    """Return whether a user compiled the forward pass of `model`."""
    return model._compiled_call_impl is not None or hasattr(model.forward, "_torchdynamo_orig_callable")


def uncompiled(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model that its user compiled runs as it is.

    Compiled passes do not call hooks that were placed after they were built.
    """
    return _uncompiled() if is_compiled(model) else NO_CONTEXT


@contextmanager
def _uncompiled() -> Iterator[None]:
    with STANCE, torch.compiler.set_stance("force_eager"):
        yield


# Shapes: B rows, Q positions, D size of all query heads.


class QueryScales:
    """The attention temperature of Llama 4 at the positions of a pass; models of other types have no such layers.

    Layers without rotation multiply the query at position t by 1 + attn_scale * log(1 + floor((t + 1) / floor_scale)).
    transformers counts t from the number of tokens in the cache, which is another number where rows differ in length,
    at the nodes of a tree, in compiled passes, and in rows with several texts.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = self._layers_of(model)
        self._hooks = [self._hook(layer) for layer in self._layers]
        """The same functions in every pass, or torch would compile the pass again."""
        self.positions_BQ: Tensor | None = None
        """The positions of the pass, set before the layers run."""

    @staticmethod
    def _layers_of(model: PreTrainedModel) -> list[Any]:
        if not getattr(text_config(model), "attn_temperature_tuning", False):
            return []
        return [part for part in model.modules() if not getattr(part, "use_rope", True)]

    def __bool__(self) -> bool:
        return bool(self._layers)

    def reading(self, positions_BQ: Tensor | None = None) -> AbstractContextManager[None]:
        """Let the layers scale their queries by these positions, or by those that `positions_BQ` is set to later."""
        return self._reading(positions_BQ) if self._layers else NO_CONTEXT

    @contextmanager
    def _reading(self, positions_BQ: Tensor | None) -> Iterator[None]:
        handles = []
        try:
            self.positions_BQ = positions_BQ
            for layer, hook in zip(self._layers, self._hooks, strict=True):
                handles.append(layer.q_proj.register_forward_hook(hook))
                layer.attn_temperature_tuning = False
            yield
        finally:
            for layer in self._layers:
                layer.attn_temperature_tuning = True
            for handle in handles:
                handle.remove()
            self.positions_BQ = None

    def _hook(self, layer: Any) -> Any:
        def scaled(_: nn.Module, __: tuple, queries_BQD: Tensor) -> Tensor:
            assert self.positions_BQ is not None
            steps_BQ = torch.floor((self.positions_BQ.float() + 1.0) / layer.floor_scale)
            scales_BQ = torch.log1p(steps_BQ) * layer.attn_scale + 1.0
            return (queries_BQD * scales_BQ[..., None]).to(queries_BQD.dtype)

        return scaled
