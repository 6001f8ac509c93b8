"""Independent draft models: a small causal LM with the target's vocabulary, or the target's first layers.

    committed tokens ──▶ [small LM, own KV cache] ──▶ d1 ──▶ d2 ──▶ … ──▶ d_gamma

A draft model reads only tokens, so any transformers causal LM with the same tokenizer works, trained here or not.
Leviathan et al. 2023, arXiv:2211.17192.

Early exit (self-speculation) uses the target's first layers and its lm_head, without weights of its own:

    committed tokens ──▶ layer 1 … layer k ──▶ norm ──▶ lm_head ──▶ d1 ──▶ d2 ──▶ …

Acceptance depends on the target; it is much higher for models trained for early exit (LayerSkip, Elhoushi et al. 2024,
arXiv:2404.16710).
"""

from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftsmith.errors import ConfigError, reason_of
from draftsmith.heads.base import (
    Context,
    DraftStates,
    Level,
    TeacherSignals,
    TrainableDrafter,
    unread,
)
from draftsmith.heads.hidden_states import final_states, layer_lists, layers_name, layers_of, text_weights
from draftsmith.heads.lm_head import logits_head
from draftsmith.heads.lora import add_lora, check_lora, whole
from draftsmith.heads.model_config import context_limit, plain_model, require_in_memory, text_config
from draftsmith.heads.untrusted import (
    load_all_weights,
    require_countable,
    require_whole_model,
    shared_vocabulary,
    without_warnings,
)

MOST_LAYERS = 1024
"""Maximum number of layers of a model that is built from a recipe's config."""


class DraftModel(TrainableDrafter):
    """A transformers LM, `model`, as a drafter with its own KV cache."""

    type: ClassVar[str] = "draft_model"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = plain_model(model)
        self.vocab_size = text_config(model).vocab_size
        self.context_limit = context_limit(model.config)

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        model: str | None = None,
        config: dict[str, Any] | None = None,
        num_hidden_layers: int = 1,
        intermediate_size: int | None = None,
        init: Literal["random", "target_layers"] = "random",
        keep: Literal["even", "first", "last"] | list[int] = "even",
        lora_rank: int | None = None,
    ) -> Self:
        """Return a small model with the target's vocabulary: a checkpoint, any config, or the target's architecture.

        Args:
            model: a checkpoint to start from.
            config: a transformers config of a model to build with random weights.
            init: "target_layers" prunes the target: it copies embeddings, norms, lm_head and the layers that `keep`
                names, and keeps the target's widths.
            num_hidden_layers, intermediate_size: of a model with the target's architecture.
            lora_rank: train only adapters of this rank.
        """
        target = plain_model(target)
        if (model is not None) + (config is not None) + (init == "target_layers") > 1:
            raise ConfigError(
                "drafter.model, drafter.config and drafter.init='target_layers'; expected at most one of them"
            )
        if model is not None:
            draft = _pretrained(model, target)
        elif config is not None:
            draft = _from_scratch(config, target)
        else:
            draft = _of_target(target, num_hidden_layers, intermediate_size, init, keep)
        if lora_rank is not None:
            check_lora(draft, "drafter", rank=lora_rank)
            add_lora(draft, rank=lora_rank)
        return cls(draft)

    @classmethod
    def like_target(cls, target: PreTrainedModel, **options: Any) -> Self:
        if (name := options.get("model")) is not None:
            options = {**options, "model": None, "config": pretrained_config(name)}
        return cls.from_target(target, **options)

    @classmethod
    def require_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        if (name := options.get("model")) is not None:
            shared_vocabulary(name, name, tokenizer)

    @property
    def language_model(self) -> PreTrainedModel:
        return self.model

    def section(self) -> dict[str, Any]:
        sizes = self.model.config.to_dict()
        return {key: sizes[key] for key in ("num_hidden_layers", "intermediate_size") if key in sizes}

    def train_further(self, **options: Any) -> None:
        if options.get("lora_rank") is not None:
            add_lora(self.model, rank=options["lora_rank"])

    def trained_blocks(self) -> list[nn.Module]:
        return layers_of(self.model)

    def outside_layers(self) -> list[nn.Parameter]:
        models = [model for model in self.modules() if isinstance(model, PreTrainedModel)]
        heads = [head for model in models if (head := model.get_output_embeddings()) is not None]
        return [*super().outside_layers(), *(weight for head in heads for weight in head.parameters())]

    def config(self) -> dict[str, Any]:
        return self.model.config.to_diff_dict()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        options = {key: value for key, value in config.items() if key != "model_type"}
        built_from = AutoConfig.for_model(config["model_type"], **options)
        auto = AutoModelForSeq2SeqLM if built_from.is_encoder_decoder else AutoModelForCausalLM
        return cls(_built(lambda kind: auto.from_config(built_from, attn_implementation=kind)))

    def start(self, context: Context) -> None:
        super().start(context)
        self._runner = context.runner(self.model)
        # The logits of the first round, too. After a sequence longer than the context nothing is drafted.
        self._logits_BV = self._runner.append(
            [self._known(sequence.tokens[: self.context_limit]) for sequence in context.sequences]
        )

    def begin(self, rows: list[int]) -> Tensor:
        # Unread are the last committed token, and after a round with full acceptance also the one before it; in the
        # first round none.
        tokens = unread(self.context, rows, self._runner)
        if any(tokens):
            self._logits_BV = self._runner.append(list(map(self._known, tokens)))
        return self._logits_BV

    def _known(self, tokens: list[int]) -> list[int]:
        """Return `tokens` with 0 for ids beyond this model's vocabulary, which a larger padded target may have."""
        if self.shared_vocabulary is None:
            return tokens
        return [token if token < self.vocab_size else 0 for token in tokens]

    def extend(self, level: Level) -> Tensor:
        if self.shared_vocabulary is not None:  # tokens of a larger padded target
            level = replace(level, tokens_Bn=level.tokens_Bn.masked_fill(level.tokens_Bn >= self.vocab_size, 0))
        return self._runner.extend(level)

    def rollback(self, slots: Sequence[list[int]]) -> None:
        self._runner.commit(slots)

    def drop(self, rows: list[int]) -> None:
        self._runner.drop(rows)

    def unroll(self, signals: TeacherSignals) -> list[DraftStates]:
        states_BTD = final_states(
            self.model,
            signals.input_ids_BT,
            signals.attention_mask_BT,
            signals.source_BS,
            signals.source_mask_BS,
            signals.documents_BT,
        )
        return [DraftStates.everywhere(states_BTD, logits_head(self.model))]


def _pretrained(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """Return the model of a checkpoint, with its padded vocabulary cut or extended to the target's size."""
    auto = AutoModelForSeq2SeqLM if target.config.is_encoder_decoder else AutoModelForCausalLM
    try:
        require_whole_model("drafter.model", name)
        options = {"trust_remote_code": False, "dtype": torch.float32}
        model = _built(lambda kind: load_all_weights("drafter.model", name, auto, attn_implementation=kind, **options))
    except ConfigError:
        raise
    except Exception as error:
        raise _no_model(name, error) from error
    vocab_size = text_config(target).vocab_size
    if text_config(model).vocab_size != vocab_size:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def _built(build: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Return a model whose attention takes tree masks: sdpa, or eager for architectures without it, such as Gemma 2.

    The implementation is always passed explicitly, so that the model's config cannot choose one.
    """
    try:
        model = build("sdpa")
    except ConfigError:
        raise  # also a ValueError, but not about the attention
    except ValueError:
        return build("eager")
    if getattr(text_config(model), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # with sdpa, transformers 5.17 silently omits the cap
    return model


def pretrained_config(name: str) -> dict[str, Any]:
    """Return the config of the checkpoint `name`; raise ConfigError where there is none."""
    try:
        require_countable(f"drafter.model={name}: config.json", PreTrainedConfig.get_config_dict(name)[0])
        with without_warnings():
            return AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
    except ConfigError:
        raise
    except Exception as error:  # configs raise errors without a common base class
        raise _no_model(name, error) from error


def _no_model(name: str, error: Exception) -> ConfigError:
    """Return the error for a checkpoint that cannot be loaded."""
    return ConfigError(f"drafter.model={name}; expected a language model's folder or Hub id ({reason_of(error)})")


def _from_scratch(values: dict[str, Any], target: PreTrainedModel) -> PreTrainedModel:
    """Return a model with random weights from a transformers config; vocabulary and special tokens are the target's."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ConfigError.of("drafter.config.model_type", kind, "a model type of transformers, such as llama or gpt2")
    require_countable("drafter.config", values)
    theirs = text_config(target)
    special = {key: getattr(theirs, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    options = {key: value for key, value in values.items() if key != "model_type"}
    auto = AutoModelForSeq2SeqLM if target.config.is_encoder_decoder else AutoModelForCausalLM
    try:
        config = AutoConfig.for_model(kind, **{**special, **options, "vocab_size": theirs.vocab_size})
        if config.num_hidden_layers > MOST_LAYERS:
            raise ValueError(f"num_hidden_layers={config.num_hidden_layers}; at most {MOST_LAYERS} are built")
        return _built(lambda kind: auto.from_config(config, dtype=torch.float32, attn_implementation=kind))
    except Exception as error:
        raise ConfigError(
            f"drafter.config={values}; expected a language model's config ({reason_of(error)})"
        ) from error


def _of_target(
    target: PreTrainedModel,
    num_hidden_layers: int,
    intermediate_size: int | None,
    init: str,
    keep: str | list[int],
) -> PreTrainedModel:
    """Return a model of the target's architecture, with fewer layers and optionally another width of the MLPs."""
    # Of a vision-language target, the language model.
    config = deepcopy(target.config if target.config.is_encoder_decoder else text_config(target))
    depth = getattr(config, "num_hidden_layers", None)
    if depth is None:
        raise ConfigError(
            f"model_type={config.model_type!r} is made of several models; expected drafter.config or drafter.model"
        )
    if not isinstance(keep, str):
        if not keep or any(not 0 <= layer < depth for layer in keep) or sorted(set(keep)) != keep:
            raise ConfigError.of("drafter.keep", keep, f"rising layers of the target, 0 to {depth - 1}")
        num_hidden_layers = len(keep)
    if not 1 <= num_hidden_layers <= depth:
        raise ConfigError.of("drafter.num_hidden_layers", num_hidden_layers, f"1 to the target's {depth}")
    if init == "random" and getattr(config, "altup_num_inputs", 1) > 1:
        raise ConfigError(
            f"model_type={config.model_type!r} with random weights has no finite gradients at padding; "
            "expected drafter.config with another model_type, such as llama"
        )
    chosen = kept_layers(keep, num_hidden_layers, depth)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        config = _resized(config, chosen, intermediate_size)
        model = _built(lambda kind: auto.from_config(config, dtype=torch.float32, attn_implementation=kind))
    except ConfigError:
        raise
    except Exception as error:  # architectures have conditions of their own, and errors without a common base class
        raise ConfigError(
            f"drafter of layers {chosen} cannot be built ({reason_of(error)}); expected "
            "other layers, drafter.config or drafter.model"
        ) from error
    if init == "target_layers":
        if intermediate_size is not None:
            raise ConfigError("drafter.init='target_layers' keeps the target's widths; expected no other width")
        copy_layers(target, model, chosen)
    return model


def kept_layers(keep: str | list[int], count: int, depth: int) -> list[int]:
    """Return the layers that a draft model of `count` layers keeps of a target with `depth` layers."""
    if not isinstance(keep, str):
        return list(keep)
    if keep == "even":
        return spread(count, depth)
    if keep == "first":
        return list(range(count))
    return list(range(depth - count, depth))


def _resized(config: PreTrainedConfig, layers: list[int], intermediate_size: int | None) -> PreTrainedConfig:
    """Return `config` with the number of these layers and the given width of MLPs; it is changed."""
    own = config.to_dict().get("per_layer_config") or {}  # Gemma 4: values of single layers
    if getattr(config, "num_kv_shared_layers", 0):
        config.num_kv_shared_layers = 0  # a few layers have keys of their own
    config.num_hidden_layers = len(layers)
    if hasattr(config, "decoder_layers"):  # BART and its relatives; their num_hidden_layers is the encoder's
        config.decoder_layers = len(layers)
    elif config.is_encoder_decoder:
        config.num_decoder_layers = len(layers)
    _keep_types(config, layers)
    if own:  # made again as it is when a checkpoint is loaded, where the last layer becomes a full one
        values = {name: value for name, value in config.to_dict().items() if name != "per_layer_config"}
        kept = {new: own[key] for new, old in enumerate(layers) for key in (old, str(old)) if key in own}
        config = type(config)(**{**values, "per_layer_config": kept})
    if intermediate_size is not None:
        config.intermediate_size = intermediate_size
    return config


def _keep_types(config: PreTrainedConfig, layers: list[int]) -> None:
    """Keep the types and sizes of these layers in place; where derived from the layers' indices, they are unchanged."""
    for name in ("layer_types", "mlp_layer_types", "intermediate_size", "activation_sparsity_pattern"):
        stored = getattr(type(config), config.attribute_map.get(name, name), None)
        if not isinstance(stored, property) and isinstance(getattr(config, name, None), list | tuple):
            setattr(config, name, [getattr(config, name)[layer] for layer in layers])


def spread(count: int, depth: int) -> list[int]:
    """Return `count` of `depth` layers, evenly spaced from the first to the last; only the first for a count of 1."""
    if count == 1:
        return [0]
    return [round(i * (depth - 1) / (count - 1)) for i in range(count)]


@torch.no_grad()
def copy_layers(target: PreTrainedModel, model: PreTrainedModel, layers: list[int]) -> None:
    """Copy the target's weights into `model`, whose layer i becomes the target's layer `layers[i]`."""
    layer_lists(target)  # raises for a target that was loaded without layers
    prefixes = [f"{name}." for name in layer_lists(model)]
    weights = {}
    for name, value in text_weights(target, model).items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            weights[name] = value
            continue
        index, rest = name.removeprefix(prefix).split(".", 1)
        for new, old in enumerate(layers):
            if int(index) == old:
                weights[f"{prefix}{new}.{rest}"] = whole(value)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # T5 keeps the position bias of all layers in its first one
        raise ConfigError(
            f"drafter.keep={layers} makes no model ({reason_of(error, whole=True)}); expected other layers"
        ) from error


class EarlyExit(DraftModel):
    """A draft model of the target's own modules, with only its first layers."""

    type: ClassVar[str] = "early-exit"

    def __init__(self, target: PreTrainedModel, *, layers: int | None = None) -> None:
        if target.config.is_encoder_decoder:
            raise ConfigError(f"model_type={target.config.model_type!r}; expected a decoder-only target for early exit")
        depth: int = text_config(target).num_hidden_layers
        layers = max(1, depth // 4) if layers is None else layers
        if not 1 <= layers < depth:
            raise ConfigError.of("layers", layers, f"1 to {depth - 1}, fewer than the target has")
        super().__init__(first_layers(target, layers))
        self.layers = layers


def first_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """Return `target` with only its first `count` layers; the modules are the target's own, not copies."""
    target = plain_model(target)
    require_in_memory(target, layers=True)
    config = deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "hidden_size_per_layer_input", 0):
        raise ConfigError(
            f"model_type={config.model_type!r} has one table of embeddings for all layers; expected another target for "
            "early exit"
        )
    try:
        text.num_hidden_layers = count
    except NotImplementedError as error:  # ProphetNet has an encoder's and a decoder's number
        raise ConfigError(f"model_type={config.model_type!r}; expected another target for early exit") from error
    _keep_types(text, list(range(count)))
    model = _shortened(target, layers_name(target).split("."), {type(text): text, type(config): config}, count)
    assert isinstance(model, PreTrainedModel)
    return model


def _shortened(
    module: nn.Module, path: list[str], configs: dict[type[PreTrainedConfig], PreTrainedConfig], count: int
) -> nn.Module:
    """Return a shallow copy of `module` in which the list of layers at `path` has `count` entries.

    `configs`: of the model, and of its language model where that has one of its own.
    """
    if not path:
        assert isinstance(module, nn.ModuleList)
        return nn.ModuleList(list(module)[:count])
    clone = copy(module)
    clone._modules = dict(module._modules)
    if "config" in clone.__dict__:
        clone.__dict__["config"] = configs[type(clone.__dict__["config"])]
    clone._modules[path[0]] = _shortened(module.get_submodule(path[0]), path[1:], configs, count)
    return clone
