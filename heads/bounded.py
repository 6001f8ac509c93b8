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
WHOLE, PACKED = 4, 16
"""Numbers that may be built for each in a file: an encoder-decoder model makes its embeddings four times before it ties
them; of quantized weights one number may hold eight."""
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
        packed: quantized weights.
    """
    numbers = sum(math.prod(shape) for shape in held.values())
    most = ALWAYS + (PACKED if packed else WHOLE) * numbers
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
            self._taken += _asked(function, args, kwargs or {})
            if self._taken > self._most:
                self._refuse(self._taken)
        return function(*args, **(kwargs or {}))


def _asked(function: Any, args: tuple, named: dict[str, Any]) -> int:
    """Numbers that a factory is asked for."""
    if function is torch.arange:
        given = named | dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False))
        return int(abs(given["end"] - given.get("start", 0)) / abs(given.get("step", 1))) + 1
    if function is torch.eye:
        given = named | dict(zip(("n", "m"), args, strict=False))
        return given["n"] * given.get("m", given["n"])
    size = args or named.get("size", ())
    size = size[0] if size and isinstance(size[0], tuple | list) else size
    return math.prod(value for value in size if isinstance(value, int))


def _refusal(name: str | Path, claimed: str, expected: str) -> ConfigError:
    return ConfigError(f"drafter={name} cannot be read: config.json claims {claimed}; expected {expected}")
