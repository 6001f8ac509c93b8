"""Quantized targets (torchao): the matrices of the layers take one byte a number."""

from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

from draftsmith.errors import ConfigError
from draftsmith.heads.hidden_states import layer_lists

LEAST_SHARE = 0.5
"""Share of the layers' weights that must be in matrices that are quantized."""


def require_quantization(kind: str, dtype: str) -> None:
    """Raise ConfigError where this machine cannot quantize a target of this dtype."""
    key = f"target.quantization={kind}"
    if kind == "float8" and dtype != "bfloat16":
        raise ConfigError(f"{key} with target.dtype={dtype}; expected bfloat16, which its kernels read")
    if find_spec("torchao") is None:
        raise ConfigError(f"{key} needs torchao; expected null, or: pip install '.[quantization]'")
    if kind == "float8" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        raise ConfigError(f"{key} without a GPU that multiplies float8 (CUDA capability 8.9 or more); expected int8")


def quantized_matrices(model: PreTrainedModel, kind: str) -> list[nn.Linear]:
    """Return the linear layers inside the model's layers that `quantize` changes; all other weights stay as they are.

    Raises:
        ConfigError: where they hold less than half of the layers' weights, as with experts in one tensor.
    """
    lists = [model.get_submodule(name) for name in layer_lists(model)]
    linear = [module for layers in lists for module in layers.modules() if isinstance(module, nn.Linear)]
    found = [module for module in linear if _quantizes(module, kind)]
    inside = sum(module.weight.numel() for module in found)
    total = sum(weight.numel() for layers in lists for weight in layers.parameters())
    if inside < LEAST_SHARE * total:
        raise ConfigError(
            f"target.quantization={kind} with {type(model).__name__}, which has {inside / total:.0%} of its layers' "
            "weights in linear layers; expected null, or a dense target"
        )
    return found


def _quantizes(module: nn.Linear, kind: str) -> bool:
    return kind == "int8" or all(size % 16 == 0 for size in module.weight.shape)  # what float8 kernels need


def saved_bytes(model: PreTrainedModel, kind: str) -> int:
    """Return the bytes that `quantize` saves: a number takes one byte, and each row of a matrix a scale in float32."""
    weights = [module.weight for module in quantized_matrices(model, kind)]
    return sum(weight.numel() * (weight.element_size() - 1) - len(weight) * 4 for weight in weights)


def quantize(model: PreTrainedModel, kind: str, device: torch.device) -> None:
    """Move the model's layers to `device` and quantize their matrices, layer by layer.

    'int8' rounds weights only; products are computed in the model's dtype. 'float8' rounds the activations too, and
    multiplies in float8.
    """
    ao = import_module("torchao.quantization")
    config = (
        ao.Int8WeightOnlyConfig(set_inductor_config=False)
        if kind == "int8"
        else ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), set_inductor_config=False)
    )
    chosen = set(quantized_matrices(model, kind))
    for name in layer_lists(model):
        for layer in model.get_submodule(name).children():
            layer.to(device)
            ao.quantize_(layer, config, lambda module, _: module in chosen)
    vars(model)["draftsmith_quantization"] = kind
    model.requires_grad_(False)
