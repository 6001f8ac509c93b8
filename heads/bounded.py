"""Building a module from a config that anyone may have written, within what the weights beside it can fill.

safetensors checks its own header: the tensors that it names fill the file exactly. So files bound the memory that they
take; a config does not, and is held to them here: a claim that is too large is refused before memory is taken for it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from draftsmith.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
ALWAYS = 2**24
"""Numbers that any config may claim: 64 MiB in float32."""
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.arange, torch.eye)


def shapes_in(folder: Path) -> Shapes:
    """The shape of every tensor in the folder's safetensors, from their headers. ConfigError for a damaged file."""
    found: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in list(tensors.keys())}
        except (SafetensorError, OSError) as error:
            why = f"{file.name} cannot be read ({error})"
            raise ConfigError(f"drafter={folder}: {why}; expected whole safetensors weights") from error
    return found


@contextmanager
def bounded(name: str | Path, held: Shapes, *, packed: bool = False) -> Iterator[None]:
    """ConfigError where what is built inside takes more memory, or more parameters, than such files could ask for.

    Args:
        name: of the drafter, for errors.
        held: what its files hold.
        packed: quantized weights, of which one number may hold eight.
    """
    numbers = sum(math.prod(shape) for shape in held.values())
    most = ALWAYS + (16 if packed else 2) * numbers
    parameters = 0

    def registered(*_: Any) -> None:
        nonlocal parameters
        parameters += 1
        if parameters > 4 * len(held) + 1024:  # what is tied, fused or put in another's place registers again
            raise _refusal(name, f"{parameters} parameters or more", f"what {len(held)} tensors can fill")

    def refuse(claimed: int) -> None:
        raise _refusal(name, f"{claimed} numbers or more", f"at most {most}, for the {numbers} that its files hold")

    hook = register_module_parameter_registration_hook(registered)
    try:
        with _Allowance(most, refuse):
            yield
    finally:
        hook.remove()


class _Allowance(TorchFunctionMode):
    """Adds up the sizes that torch is asked for, and calls `refuse` with the sum before it goes beyond `most`."""

    def __init__(self, most: int, refuse: Callable[[int], None]) -> None:
        super().__init__()
        self._most, self._refuse, self._taken = most, refuse, 0

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in FACTORIES:
            self._taken += _asked(function, args or (kwargs or {}).get("size", ()))
            if self._taken > self._most:
                self._refuse(self._taken)
        return function(*args, **(kwargs or {}))


def _asked(function: Any, size: tuple) -> int:
    """Numbers that a factory is asked for; arange takes (end), (start, end) or (start, end, step)."""
    if function is torch.arange:
        start, end, step = (0, *size, 1) if len(size) == 1 else (*size, 1)[:3]
        return int(abs(end - start) / abs(step)) + 1
    size = size[0] if size and isinstance(size[0], tuple | list) else size
    return math.prod(value for value in size if isinstance(value, int))


def _refusal(name: str | Path, claimed: str, expected: str) -> ConfigError:
    return ConfigError(f"drafter={name} cannot be read: config.json claims {claimed}; expected {expected}")
