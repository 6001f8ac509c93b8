"""The part of a sequence that one of several processes computes, and their exchange of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Shapes: B rows, M positions of keys, L positions of keys in the part of a process, g key heads, d head size.


class SequencePart:
    """Sequence parallelism: the positions at which one process of a group computes keys and states.

    Parts follow each other in the order of the processes.

    Args:
        index: of the part.
        count: number of parts.
        group: the processes that share a sequence; None to count memory, where the keys of other parts are zeros.
    """

    def __init__(self, index: int, count: int, group: dist.ProcessGroup | None = None) -> None:
        self.index, self.count, self.group = index, count, group

    def positions(self, length: int, index: int | None = None) -> slice:
        """Return the positions of this part, or of part `index`, among `length`."""
        index = self.index if index is None else index
        return slice(length * index // self.count, length * (index + 1) // self.count)

    def whole(self, own_BgLd: Tensor, length: int) -> Tensor:
        """Return keys or values of the positions of all parts [B, g, M, d], with their gradient."""
        gathered = _Gathered.apply(own_BgLd, self, length)
        assert isinstance(gathered, Tensor)
        return gathered

    def gather(self, own_BgLd: Tensor, length: int) -> Sequence[Tensor]:
        """Return the keys or values of every part."""
        sizes = [own.stop - own.start for own in (self.positions(length, n) for n in range(self.count))]
        if self.group is None:
            B, g, _, d = own_BgLd.shape
            return [own_BgLd if n == self.index else own_BgLd.new_zeros(B, g, size, d) for n, size in enumerate(sizes)]
        padded = nn.functional.pad(own_BgLd, (0, 0, 0, max(sizes) - own_BgLd.shape[2])).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:, :, :size] for part, size in zip(parts, sizes, strict=True)]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_BgLd: Tensor, part: SequencePart, length: int) -> Tensor:
        ctx.part, ctx.length = part, length
        return torch.cat(list(part.gather(own_BgLd, length)), 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g_BgMd,) = gradients
        # Summed in float32: each process has the gradient of its own queries.
        sum_BgMd = g_BgMd.to(torch.promote_types(g_BgMd.dtype, torch.float32), copy=True).contiguous()
        if ctx.part.group is not None:
            dist.all_reduce(sum_BgMd, group=ctx.part.group)
        return sum_BgMd[:, :, ctx.part.positions(ctx.length)].to(g_BgMd.dtype), None, None
