"""Count the reads and uploads that a decoder would make on an accelerator, in a run on the CPU."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import draftsmith

PACKAGE = f"{Path(draftsmith.__file__).parent}/"
TORCH = f"{Path(torch.__file__).parent}/"

aten = torch.ops.aten
SIZED_BY_VALUES = {
    *(aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount, aten.multinomial),
    *(aten._unique, aten._unique2, aten.unique_dim, aten.unique_consecutive),
}
"""Operators whose result the host needs, as a number or as a size. `item`, `bool`, `if` and `where(condition)` end
here."""
LEAVING = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
"""Methods that bring a tensor to the host, and that no operator shows on the CPU."""
FROM_LISTS = (torch.tensor, torch.as_tensor)
INDEXING = (Tensor.__getitem__, Tensor.__setitem__)


@dataclass(frozen=True)
class Read:
    """One read: the operation, and the innermost line of draftsmith that caused it."""

    operation: str
    place: str


class Reads(list[Read]):
    """All reads in order, and all uploads; as text, one line for each place with its count."""

    def __init__(self, reads: Iterable[Read] = (), uploads: Iterable[Read] = ()) -> None:
        super().__init__(reads)
        self.uploads = list[Read](uploads)

    def __str__(self) -> str:
        return "\n".join(_lines(self) + _lines(self.uploads))


def _lines(transfers: Iterable[Read]) -> list[str]:
    return [f"{count:5d} {read.operation:20s} {read.place}" for read, count in Counter(transfers).most_common()]


@contextmanager
def counted_reads(*models: nn.Module) -> Iterator[Reads]:
    """Yield the list of reads of tensors on the device, which grows while the block runs.

    On the CPU all memory is the host's, so each tensor gets a place by its origin. On the device are: parameters of
    `models`, tensors made with a `device` argument or moved by `to` a `torch.device`, and results of every operator
    with an operand there. On the host are all other tensors: those made from lists or by a generator, and copies by
    `cpu()`, `to("cpu")` and other reads.

    A read is: `item`, `int`, `float`, `bool` and `tolist` of a tensor on the device, `numpy`, `cpu()` and `to("cpu")`,
    a copy into a tensor on the host, and operators whose result has a size that depends on values: `nonzero`,
    `masked_select`, `unique`, `bincount`, `repeat_interleave` with a tensor of repeats but no `output_size`, and
    indexing with a mask (assignment of a number does not need its size). `equal` and `multinomial` check values on the
    host.

    An upload is: a tensor made from a list or a number with a `device` argument, a tensor of the host that moves by
    `to`, and indexing a tensor on the device with a list or with a tensor of the host.

    Not seen: reads inside the forward passes of `models`, hooks included; `to` a `torch.device("cpu")`, which cannot be
    told from the device of the models; `torch.cuda.synchronize`; operators outside this list that wait on CUDA only,
    such as decompositions.
    """
    reads = Reads()
    tracker = _Tracker(reads)
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tracker.put(tensor)
    hooks = []
    for model in models:
        hooks.append(model.register_forward_pre_hook(lambda *_: tracker.pause(1), prepend=True))
        hooks.append(model.register_forward_hook(lambda *_: tracker.pause(-1), always_call=True))
    try:
        with _Calls(tracker), _Operators(tracker):
            yield reads
    finally:
        for hook in hooks:
            hook.remove()


class _Tracker:
    """The memory that counts as the device's, and the reads of it. Memory is kept, so no address is used twice."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._paused = 0
        self._storages: dict[int, torch.UntypedStorage] = {}

    def pause(self, levels: int) -> None:
        self._paused += levels

    def put(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def host_copy(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host."""
        copied = tensor.clone()
        self._storages.pop(copied.untyped_storage()._cdata, None)
        return copied

    def read(self, operation: str) -> None:
        if not self._paused:
            self._reads.append(Read(operation, line_of_package()))

    def upload(self, operation: str) -> None:
        if not self._paused:
            self._reads.uploads.append(Read(operation, line_of_package()))


class _Operators(TorchDispatchMode):
    """Follows tensors on the device through all operators, and notes the operators that read them."""

    def __init__(self, tracker: _Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        holds = self._tracker.holds
        if not any(map(holds, tensors_in(args, *kwargs.values()))):
            return func(*args, **kwargs)
        with self:  # under inference_mode, `item` and others arrive here before they are taken apart
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        to_host = func.overloadpacket is aten.copy_ and not holds(args[0])
        if to_host or self._reads(func, args, kwargs):
            self._tracker.read(func.overloadpacket.__name__)
        out = func(*args, **kwargs)
        for tensor in () if to_host else tensors_in(out):
            self._tracker.put(tensor)
        return out

    def _reads(self, func: Any, args: tuple, kwargs: dict) -> bool:
        operator = func.overloadpacket
        if operator is aten.repeat_interleave:
            return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if operator in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            number = len(args) > 2 and args[2].numel() == 1 and not self._tracker.holds(args[2])
            return not number and any(_is_mask(index) for index in args[1])
        return operator in SIZED_BY_VALUES


class _Calls(TorchFunctionMode):
    """Gives tensors their place by the calls that make or move them, which no operator shows on the CPU."""

    def __init__(self, tracker: _Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tracker = self._tracker
        if func in LEAVING and tracker.holds(args[0]):
            return self._leave(func, args, kwargs)
        if func is Tensor.to:
            return self._move(args, kwargs)
        if func in FROM_LISTS and not isinstance(args[0], Tensor):
            for _ in filter(tracker.holds, tensors_in(args[0])):
                tracker.read("tensor of tensors")
            if _is_device(kwargs.get("device")):
                tracker.upload(func.__name__)
        if func in INDEXING and tracker.holds(args[0]):
            for _ in filter(self._is_of_host, args[1] if isinstance(args[1], tuple) else (args[1],)):
                tracker.upload("index")
        out = func(*args, **kwargs)
        if _is_device(kwargs.get("device")) and isinstance(out, Tensor):
            tracker.put(out)
        return out

    def _is_of_host(self, index: object) -> bool:
        return isinstance(index, list) or (
            isinstance(index, Tensor) and index.dim() > 0 and not self._tracker.holds(index)
        )

    def _leave(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        self._tracker.read(func.__name__)
        self._tracker.pause(1)
        try:
            return self._tracker.host_copy(args[0]) if func is Tensor.cpu else func(*args, **kwargs)
        finally:
            self._tracker.pause(-1)

    def _move(self, args: tuple, kwargs: dict) -> Tensor:
        """Move a tensor. Where `to` has nothing to do on the CPU, a copy stands for the tensor at its new place."""
        tensor, device = args[0], kwargs.get("device", args[1] if len(args) > 1 else None)
        out = Tensor.to(*args, **kwargs)
        if device == "cpu" and self._tracker.holds(tensor):
            self._tracker.read("to")
            return self._tracker.host_copy(out)
        if _is_device(device) and not self._tracker.holds(tensor):
            out = self._tracker.host_copy(out)
            self._tracker.put(out)
            self._tracker.upload("to")
        return out


def tensors_in(*values: object) -> Iterator[Tensor]:
    """Yield the tensors among `values` and in lists and tuples inside them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_device(device: object) -> bool:
    """Return whether a call names the models' device: any but "cpu" by name, which is the host."""
    return isinstance(device, torch.device)


def line_of_package() -> str:
    """Return file and line of the innermost frame in draftsmith, or else of the innermost one outside torch."""
    outside, frame = "", sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        if not outside and file != __file__ and not file.startswith(TORCH):
            outside = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
