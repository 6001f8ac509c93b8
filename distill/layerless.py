"""A target without its layers: config, tokenizer, embeddings, last norm and lm_head, read by the safetensors index.

An engine computes the layers. transformers' own class is built with no layers, so that norms, scales and caps are the
model's own; of a sharded checkpoint only the files that hold these tensors are opened, or downloaded from the Hub.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftsmith.distill import gguf_target
from draftsmith.distill.cotraining import is_adapter
from draftsmith.distill.load_target import DTYPES, LoadedTarget, source_of, unreadable
from draftsmith.errors import ConfigError
from draftsmith.heads.lm_head import logits_map
from draftsmith.heads.model_config import text_config
from draftsmith.heads.untrusted import INDEX, first_of, missing_tensors, without_warnings
from draftsmith.names import check_target_name
from draftsmith.provenance import IN_LAYER
from draftsmith.reading import read_json

# Shapes: T positions, H hidden size.

WEIGHTS = "model.safetensors"
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "n_layers", "n_layer")
"""Keys of a config with the number of layers of a decoder or of an encoder of images."""


def has_layers(model: PreTrainedModel) -> bool:
    """Return whether a target was loaded with its layers."""
    return not getattr(model, "draftsmith_layerless", False)


def load_without_layers(
    name: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    head_from: str | None = None,
    modules: bool = False,
) -> LoadedTarget:
    """Return a frozen target that has no layers; arguments as for `load_target`.

    Args:
        head_from: another checkpoint of the same model, of which the tensors outside the layers are read, where those
            of `name` are quantized.
        modules: also download the files with the target's own modules for multi-token prediction.

    Raises:
        ConfigError: for a target that is not found or cannot be read, of a class that transformers does not have, or
            with embeddings or an lm_head that are quantized.
    """
    check_target_name(name)
    if is_adapter(Path(name).expanduser()):
        raise ConfigError(f"target={name} is an adapter; expected the merged model, which the engine serves")
    try:
        gguf = gguf_target.gguf_file(name, revision)
        source = str(gguf_target.model(gguf, DTYPES[dtype])) if gguf else source_of(name)
        options: dict[str, Any] = {} if revision is None else {"revision": revision}
        tokenizer, config = (
            AutoTokenizer.from_pretrained(source, **options),
            AutoConfig.from_pretrained(source, **options),
        )
        if head_from is None:
            tensors = _outside_layers(source, revision, f"target={name}")
        else:
            check_target_name(head_from)
            tensors = _outside_layers(source_of(head_from), None, f"target.head_from={head_from}")
        model = _built(f"target={head_from or name}", config, tensors, DTYPES[dtype])
        model.config._name_or_path = source  # where the target's own modules are read from
        if modules:
            _download_modules(source, revision, text_config(model).num_hidden_layers)
        with suppress(OSError):  # there is no such file
            model.generation_config = GenerationConfig.from_pretrained(source, **options)
    except ConfigError:
        raise
    except Exception as error:  # tokenizers, configs and weights raise errors without a common base
        raise unreadable(name, None, error) from error
    cast(nn.Module, model).to(device).eval().requires_grad_(False)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    return LoadedTarget(model, tokenizer, name, revision, stored=stored)


def _file(source: str, name: str, revision: str | None) -> Path | None:
    """Return a file of a folder, or of a Hub repository, which is downloaded; None where there is no such file."""
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except EntryNotFoundError:
        return None


def _outside_layers(source: str, revision: str | None, subject: str) -> dict[str, Tensor]:
    """Return the tensors outside of numbered modules."""
    index = _file(source, INDEX, revision)
    if index is not None:
        weight_map = read_json(index)["weight_map"]
        shards = {str(shard) for name, shard in weight_map.items() if not IN_LAYER.search(name)}
    else:
        shards = {WEIGHTS}
    tensors: dict[str, Tensor] = {}
    for shard in sorted(shards):
        file = _file(source, shard, revision)
        if file is None:
            raise ConfigError(f"{subject} holds no {shard}; expected weights in safetensors")
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if not IN_LAYER.search(name)]  # noqa: SIM118
            tensors |= {name: opened.get_tensor(name) for name in names}
    quantized = sorted(name for name, tensor in tensors.items() if _is_packed(tensor))
    if quantized:
        raise ConfigError(
            f"{subject}: {first_of(quantized)} are quantized ({tensors[quantized[0]].dtype}); expected embeddings and "
            "an lm_head in 16 bits or more: name a checkpoint of the same model that has them in target.head_from"
        )
    return tensors


def _download_modules(source: str, revision: str | None, depth: int) -> None:
    """Download the files of a repository that hold modules after its layers."""
    index = _file(source, INDEX, revision)
    weight_map = {} if index is None else read_json(index)["weight_map"]
    for shard in {shard for name, shard in weight_map.items() if _is_module(name, depth)}:
        _file(source, shard, revision)


def _is_module(name: str, depth: int) -> bool:
    """Return whether a tensor is of a module: layers after the last one, or under a name of their own."""
    number = re.search(r"\.layers\.(\d+)\.", name)
    return "mtp" in name or (number is not None and int(number[1]) >= depth)


def _is_packed(tensor: Tensor) -> bool:
    """Return whether the values of a matrix need scales that lie elsewhere."""
    return tensor.ndim > 1 and (not tensor.is_floating_point() or tensor.dtype.itemsize < 2)


def _built(subject: str, config: PreTrainedConfig, tensors: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of `config` whose layers are missing; ConfigError where another tensor is."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{subject}: transformers has no causal language model of model_type={config.model_type!r}")
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _without_depth(config):
        read = {"state_dict": tensors, "dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
        with without_warnings():
            model, info = kind.from_pretrained(None, config=config, **read)
        for tensor, stored, expected in sorted(info["mismatched_keys"]):
            raise ConfigError(f"{subject}: {tensor} has shape {list(stored)}; expected {list(expected)} by its config")
        missing = missing_tensors(model, info["missing_keys"])
        if missing:
            raise ConfigError(f"{subject} holds no tensor {first_of(missing)}; expected all outside of the layers")
        logits_map(model)  # measured in a pass without layers, and kept
        finish_of(model.eval())
    return _described(model, config)


def skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Return a frozen model of `config` without layers, with random weights; for estimates."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with _without_depth(config):
        model = kind._from_config(config, dtype=dtype)
    return _described(model.eval().requires_grad_(False), config)


def _described(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Give a model without layers the depths of the whole target: drafters read them in its config."""
    for own, given in zip(_parts(model.config), _parts(config), strict=True):  # the model has a copy
        vars(own).update({key: value for key, value in vars(given).items() if key in DEPTHS or isinstance(value, list)})
    vars(model)["draftsmith_layerless"] = True
    return model


@contextmanager
def _without_depth(config: PreTrainedConfig) -> Iterator[None]:
    """Set the depths of a config, and of those inside it, to 0 for a while, and their lists by layer to empty ones."""
    changed: list[tuple[PreTrainedConfig, str, Any]] = []
    for part in _parts(config):
        depth = next((getattr(part, key) for key in DEPTHS if isinstance(getattr(part, key, None), int)), None)
        for key, value in list(vars(part).items()):
            by_layer = isinstance(value, list) and depth is not None and len(value) == depth
            if key in DEPTHS or by_layer:
                changed.append((part, key, deepcopy(value)))
    quantization = vars(config).pop("quantization_config", None)
    try:
        for part, key, value in changed:
            _set(part, key, [] if isinstance(value, list) else 0)
        yield
    finally:
        for part, key, value in changed:
            _set(part, key, value)
        if quantization is not None:
            vars(config)["quantization_config"] = quantization


def _set(part: PreTrainedConfig, key: str, value: Any) -> None:
    vars(part)[key] = value  # strict configs compare each value with the others


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and those inside it, each once."""
    parts = [config]
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig) and not any(value is part for part in parts):
            parts += [part for part in _parts(value) if not any(part is other for other in parts)]
    return parts


Finish = Callable[[Tensor], Tensor]
"""The map from the output of the last layer [T, H] to the input of the lm_head, on any device and in any dtype."""


def finish_of(model: PreTrainedModel) -> Finish:
    """Return the last norm of a target, with the scale after it, found once in a pass.

    Without layers nothing else lies before the lm_head. Of a whole target the result remains to be compared.

    Raises:
        ConfigError: for a model with other operations between its last norm and its lm_head.
    """
    if "draftsmith_finish" not in vars(model):
        vars(model)["draftsmith_finish"] = _finish(model)
    return vars(model)["draftsmith_finish"]


@torch.no_grad()
def _finish(model: PreTrainedModel) -> Finish:
    """See `finish_of`."""
    head: Any = model.get_output_embeddings()
    ids_1T = torch.arange(1, 9, device=head.weight.device)[None]
    calls: list[tuple[nn.Module, Tensor]] = []
    entries: list[Tensor] = []

    def keep(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        given = arguments[0] if arguments else None
        if isinstance(given, Tensor) and isinstance(output, Tensor) and given.shape == output.shape:
            calls.append((module, output))

    leaves = [module for module in model.modules() if not list(module.children()) and module is not head]
    hooks = [module.register_forward_hook(keep) for module in leaves]
    hooks.append(head.register_forward_pre_hook(lambda _, arguments: entries.append(arguments[0])))
    try:
        model(input_ids=ids_1T, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    scale = logits_map(model).state_scale
    for norm, output in reversed(calls):
        if scale is None:
            break
        if output.shape == entries[0].shape and torch.allclose(output * scale, entries[0], rtol=1e-3, atol=1e-5):
            return lambda states_TH: (norm(states_TH.to(head.weight)) * scale).to(states_TH)
    raise ConfigError(
        f"target of {type(model).__name__}: no norm lies between its last layer and its lm_head; expected a model with "
        "one, such as Llama"
    )
