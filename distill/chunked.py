"""Sums over tokens whose rows of logits never exist at once: a chunk's gradient is taken while its logits are alive.

Recomputing chunks in the backward pass would save as much memory and cost another forward pass of both lm_heads.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Chunk = Callable[[Tensor, slice], tuple[Tensor, ...]]
"""States [n, D] of the tokens in a slice to sums over them; the first is the loss, the others carry no gradient."""

# Shapes: N tokens, D hidden size of the drafter.


class _ChunkedSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function: Chunk, size: int, states_ND: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        wanted = [index for index, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        totals: list[Tensor] = []
        states_grad = torch.zeros_like(states_ND) if 0 in wanted else None
        parameter_grads = {index: torch.zeros_like(parameters[index - 1]) for index in wanted if index > 0}
        for start in range(0, max(1, states_ND.shape[0]), size):
            chunk = slice(start, start + size)
            with torch.enable_grad():
                part = states_ND[chunk].detach().requires_grad_(0 in wanted)
                loss, *others = function(part, chunk)
                inputs = [part if index == 0 else parameters[index - 1] for index in wanted]
                gradients = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
            for index, gradient in zip(wanted, gradients, strict=True):
                if gradient is None:
                    continue
                if index == 0:
                    states_grad[chunk] = gradient
                else:
                    parameter_grads[index] += gradient
            sums = [loss.detach(), *(other.detach() for other in others)]
            totals = sums if not totals else [total + value for total, value in zip(totals, sums, strict=True)]
        ctx.gradients = [
            states_grad if index == 0 else parameter_grads.get(index) for index in range(1 + len(parameters))
        ]
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx, loss_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place: a head's gradient is as large as the head, and nobody else holds it.
        scaled = [None if gradient is None else gradient.mul_(loss_grad) for gradient in ctx.gradients]
        ctx.gradients = None
        return None, None, *scaled


def chunked_sums(
    function: Chunk, states_ND: Tensor, parameters: Sequence[nn.Parameter], size: int
) -> tuple[Tensor, ...]:
    """`function`'s sums over all tokens, at most `size` at a time.

    Without any token `function` is called with none, so that all processes build the same graph: ZeRO-2 adds up the
    gradients of several processes in the order in which each of them computes them.

    Args:
        parameters: what `function` reads beside the states and is to be trained; others get no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _ChunkedSums.apply(function, size, states_ND, *trained)
