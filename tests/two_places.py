"""A pretended accelerator: runs on the CPU fail where an accelerator would find tensors of different devices."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transfers import line_of_package, tensors_in

aten = torch.ops.aten
ANY_PLACE = {aten.copy_, aten._to_copy, aten._foreach_copy_, aten.set_}
"""Operators whose operands may be in different places."""
INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
INDEXING |= {aten._unsafe_index_put}
"""Operators whose indices may be on the host."""
NO_NUMBERS = {aten.cat, aten.stack}
"""Operators that do not take a tensor of no dimensions on the host for a number."""

Place = Literal["host", "device", "either"]
"""Of a tensor that was made with or moved to a `torch.device`, here always that of the CPU, nothing more is known."""


class OtherPlace(RuntimeError):
    """An operator got tensors of the host and of the device."""


@contextmanager
def two_places() -> Iterator[None]:
    """Raise `OtherPlace` in this block where operands of an operator are on the host and others on the device.

    On the device are the weights of models that `to(torch.device("cpu"))` moved, and what is computed from them. On the
    host are tensors made without a device, those read from files, and copies by `cpu()` and `to("cpu")`. As on CUDA, a
    tensor of no dimensions may stay on the host, and so may the indices of a tensor.
    """
    places, move = _PLACES, nn.Module.to
    for name, module in list(sys.modules.items()):
        for value in vars(module).values() if name.startswith("draftsmith.") else ():
            if isinstance(value, _lru_cache_wrapper):
                value.cache_clear()  # masks and tables that were made outside, where no place was noted

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        move(module, *args, **kwargs)
        if any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
            for tensor in (*module.parameters(), *module.buffers()):
                places.put(tensor, "device")
        return module

    with _Calls(places), _Operators(places):
        nn.Module.to = to
        try:
            yield
        finally:
            nn.Module.to = move


class _Places:
    """The place of each tensor's memory, which is kept, so that no address is used twice."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, Place]] = {}

    def put(self, tensor: Tensor, place: Place) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage, place

    def of(self, tensor: Tensor) -> Place:
        return self._storages.get(tensor.untyped_storage()._cdata, (None, "host"))[1]

    def of_all(self, operator: Any, operands: list[Tensor]) -> Place:
        """Return the place of an operator's result."""
        numbers = operator not in NO_NUMBERS
        found = {self.of(x): x for x in operands if x.dim() > 0 or self.of(x) != "host" or not numbers}
        if {"host", "device"} <= found.keys() and operator not in ANY_PLACE:
            shape = list(found["host"].shape)
            raise OtherPlace(f"{operator}: a tensor {shape} is on the host, at {line_of_package()}")
        return "device" if "device" in found else "host" if "host" in found or not found else "either"


_PLACES = _Places()
"""For all blocks: masks and tables are kept from one to another."""


class _Operators(TorchDispatchMode):
    def __init__(self, places: _Places) -> None:
        super().__init__()
        self._places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        with self:  # under inference_mode, some operators arrive here before they are taken apart
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        operator = func.overloadpacket
        operands = list(tensors_in((args[0], *args[2:]) if operator in INDEXING else args, *kwargs.values()))
        place = self._places.of_all(operator, operands)
        out = func(*args, **kwargs)
        if operator in ANY_PLACE:  # into the first one; a copy stays until `to` says where it is
            place = self._places.of(args[0])
        made = {x.untyped_storage()._cdata for x in operands}
        for tensor in tensors_in(out):
            if tensor.untyped_storage()._cdata not in made:
                self._places.put(tensor, place)
        return out


class _Calls(TorchFunctionMode):
    """Gives tensors their place by the calls that make or move them, which no operator shows on the CPU."""

    def __init__(self, places: _Places) -> None:
        super().__init__()
        self._places = places

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to or func is Tensor.cpu:
            return self._moved(func, args, kwargs)
        out = func(*args, **kwargs)
        if func is Tensor.new_tensor and "device" not in kwargs:
            self._places.put(out, self._places.of(args[0]))
        elif isinstance(kwargs.get("device"), torch.device) and isinstance(out, Tensor):
            self._places.put(out, "either")
        return out

    def _moved(self, func: Callable[..., Tensor], args: tuple, kwargs: dict) -> Tensor:
        """Move a tensor. Where there is nothing to do on the CPU, a copy stands for the tensor at its new place."""
        tensor, device = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
        before, out = self._places.of(tensor), func(*args, **kwargs)
        if isinstance(device, Tensor):
            place = self._places.of(device)
        elif func is Tensor.cpu or device == "cpu":
            place: Place = "host"
        elif isinstance(device, torch.device):
            place = "either"
        else:
            place = before
        if place != before and out.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
            out = out.clone()
        self._places.put(out, place)
        return out
