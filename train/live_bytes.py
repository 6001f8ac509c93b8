"""Counting the bytes of all tensors that are alive, on tensors with data or without."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = torch.ops.aten


@contextmanager
def without_data(device: torch.device | str, marked_share: float = 1.0) -> Iterator["LiveBytes"]:
    """Everything that is made inside has shapes on `device` and no data; its bytes are counted."""
    with (
        FakeTensorMode(),
        LiveBytes(marked_share) as live,
        torch.device(device),
        patch.object(nn.Module, "_apply", _replace_parameters),
    ):
        yield live


def _replace_parameters(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` exchanges the insides of two tensors, which those without data refuse."""
    for child in module.children() if recurse else ():
        _replace_parameters(child, change)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(change(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return module


class LiveBytes(TorchDispatchMode):
    """While it is entered: `now` and `peak` bytes of the storages that operations have made and that still live.

    Under torch's FakeTensorMode nothing has data, so what depends on data is answered by rule: a mask picks
    `marked_share` of its positions, and a number that is asked for is 0, or False. What a kernel holds while it runs
    is not seen, nor is what an allocator keeps for later.
    """

    def __init__(self, marked_share: float = 1.0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._marked_share = marked_share
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), options: dict | None = None) -> Any:
        result = self._without_data(operation, arguments, options or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _without_data(self, operation: Any, arguments: tuple, options: dict) -> Any:
        first = arguments[0] if arguments else None
        fake = hasattr(first, "fake_mode")
        if fake and operation is ATEN.nonzero.default:
            return first.new_empty((self._marked(first), first.dim()), dtype=torch.long)
        if fake and operation is ATEN.index.Tensor and arguments[1][0] is not None:
            mask, *others = arguments[1]
            if mask.dtype == torch.bool and not others:
                return first.new_empty((self._marked(mask), *first.shape[mask.dim() :]))
        try:
            return operation(*arguments, **options)
        except DataDependentOutputException:
            if operation is ATEN.equal.default:
                return True
            return False if first.dtype == torch.bool else 0.0 if first.is_floating_point() else 0

    def _marked(self, mask: Tensor) -> int:
        return math.ceil(self._marked_share * mask.numel())

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
