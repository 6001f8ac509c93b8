"""LoRA adapters inside a transformers model, by peft, in place: its class, and all that reads it, stays as is.

Weights that torch keeps in shards over several processes (DTensor), as whole tensors and back.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from draftsmith.errors import ConfigError


def add_lora(model: nn.Module, *, rank: int, alpha: float, modules: list[str] | None = None) -> None:
    """Put adapters beside linear layers; from then on they alone are trained. At first they change nothing.

    `modules`: the last parts of the names of the layers; by default every linear layer but the lm_head.
    """
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules or "all-linear", init_lora_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about what peft asks of transformers, not about us
        inject_adapter_in_model(config, model)


def check_lora(model: nn.Module, section: str, *, rank: int, modules: list[str] | None = None) -> None:
    """ConfigError for a rank or layers that `model` cannot have adapters of; `section` is the recipe's."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = sorted(set(modules or ()) - names)
    if missing:
        raise ConfigError.of(f"{section}.modules", missing, f"names of layers of {type(model).__name__}")
    _require_inner(model, modules or [], f"{section}.modules")
    smallest = min(min(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
    if rank > smallest:
        raise ConfigError.of(f"{section}.lora_rank", rank, f"at most {smallest}, the smallest side of a layer")


def _require_inner(model: nn.Module, modules: list[str], key: str) -> None:
    """Embeddings and lm_head stay as they are: drafters share them, and an adapter would untie tied ones."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)}
    wrong = sorted(outer & set(modules))
    if wrong:
        tied = " (tied embeddings)" if ends[1] is not None and ends[0].weight is ends[1].weight else ""
        raise ConfigError(f"{key}={wrong}{tied}; expected layers inside the blocks of {type(model).__name__}")


def adapted_layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """The model as it was before any adapter."""
    layers = adapted_layers(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # peft freezes what it switches off
            parameter.requires_grad_(True)


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The weights with adapters added in, under the names that they have without."""
    merged = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, value in model.state_dict().items():
        owner = name.partition(".lora_")[0] if ".lora_" in name else name.partition(".base_layer.")[0]
        if owner not in layers:
            merged[name] = value
        elif ".base_layer." in name:
            plain = name.replace(".base_layer.", ".")
            is_weight = plain == f"{owner}.weight"
            merged[plain] = value + layers[owner].get_delta_weight("default").to(value.dtype) if is_weight else value
    return merged


def whole(value: Tensor) -> Tensor:
    """The whole tensor, on every process; all of them have to call it when it is in shards."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, weight: Tensor) -> Tensor:
    """`value`, which every process has whole, in shards as `weight` is; no process has to wait for another one."""
    if not isinstance(weight, DTensor):
        return value
    replicated = DTensor.from_local(value, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=weight.placements)
