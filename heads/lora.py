"""LoRA adapters inserted into a transformers model in place, by peft, and conversion of sharded weights (DTensor)."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from draftsmith.errors import ConfigError
from draftsmith.heads.lm_head import weight_of

ALPHA = 16
"""Scale of adapters: alpha / rank."""
EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "shared_expert_gate")
"""Last parts of names of layers that get no adapters in a model with fused experts.

peft takes all but the last one for the experts; that one has a single output, less than any useful rank.
"""


def add_lora(model: nn.Module, *, rank: int, modules: list[str] | None = None) -> None:
    """Insert adapters into linear layers and freeze all other weights. The adapters start with no effect.

    Args:
        modules: last parts of the layers' names; by default every linear layer except the lm_head and `EXPERTS`.
    """
    targets = modules or list(_linear(model))
    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets, init_lora_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from peft's use of transformers
        inject_adapter_in_model(config, model)


def _linear(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that get adapters by default."""
    lm_head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    left_out = _taken(model)
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not lm_head and name.rpartition(".")[2] not in left_out
    }


def _taken(model: nn.Module) -> set[str]:
    """Return `EXPERTS` for a model with fused experts, otherwise nothing."""
    return {*EXPERTS} if any(name.endswith("experts.gate_up_proj") for name, _ in model.named_parameters()) else set()


def check_lora(model: PreTrainedModel, section: str, *, rank: int, modules: list[str] | None = None) -> None:
    """Raise ConfigError for a rank or layers that do not fit `model`; `section` is the recipe's section."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    missing = sorted(set(modules or ()) - names)
    if missing:
        raise ConfigError.of(f"{section}.modules", missing, f"names of layers of {type(model).__name__}")
    taken = sorted(_taken(model) & set(modules or ()))
    if taken:
        expected = f"other layers: {type(model).__name__} has fused experts, which get no adapters"
        raise ConfigError.of(f"{section}.modules", taken, expected)
    _require_inner(model, modules or [], f"{section}.modules")
    smallest = min((min(weight_of(layer).shape) for layer in _linear(model).values()), default=rank)
    if rank > smallest:
        raise ConfigError.of(f"{section}.lora_rank", rank, f"at most {smallest}, the smallest side of a layer")


def _require_inner(model: PreTrainedModel, modules: list[str], key: str) -> None:
    """Raise ConfigError for embeddings and lm_head: drafters share them, and an adapter would untie tied ones."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = {name.rpartition(".")[2] for name, module in model.named_modules() if any(module is end for end in ends)}
    wrong = sorted(outer & set(modules))
    if wrong:
        tied = " (tied embeddings)" if ends[1] is not None and weight_of(ends[0]) is weight_of(ends[1]) else ""
        raise ConfigError(f"{key}={wrong}{tied}; expected layers inside the blocks of {type(model).__name__}")


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Disable all adapters inside the context."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:  # peft freezes disabled adapters
            parameter.requires_grad_(True)


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights with adapters merged, under the names of the model without adapters."""
    merged = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, value in model.state_dict().items():
        owner = name.partition(".lora_")[0] if ".lora_" in name else name.partition(".base_layer.")[0]
        if owner not in layers:
            merged[name] = value
        elif ".base_layer." in name:
            plain = name.replace(".base_layer.", ".")
            is_weight = plain == f"{owner}.weight"
            # Every kind of adapted layer defines get_delta_weight, but not their base class.
            delta = layers[owner].get_delta_weight if is_weight else None  # pyright: ignore[reportAttributeAccessIssue]
            merged[plain] = value if delta is None else value + delta("default").to(value.dtype)
    return merged


def whole(value: Tensor) -> Tensor:
    """Return the full tensor on every process; for a sharded tensor all processes must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, weight: Tensor) -> Tensor:
    """Return the full tensor `value` with the sharding of `weight`, without communication between processes."""
    if not isinstance(weight, DTensor):
        return value
    replicated = DTensor.from_local(value, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=weight.placements)
