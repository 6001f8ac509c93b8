"""Weights that torch keeps in shards over several processes (DTensor), as whole tensors and back."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def whole(value: Tensor) -> Tensor:
    """The whole tensor, on every process; all of them have to call it when it is in shards."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, weight: Tensor) -> Tensor:
    """`value`, which every process has whole, in shards as `weight` is; no process has to wait for another one."""
    if not isinstance(weight, DTensor):
        return value
    replicated = DTensor.from_local(value, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=weight.placements)
