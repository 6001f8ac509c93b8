"""DFlash 2: layers with short convolutions over the positions of a block, before and after attention and MLP.

    conv(x)_t = sum_i (base_i + delta_i) * x_{t-i}    for taps i = 0, 1, …; positions before the block are zero

The kernels are depthwise. `base` is a weight of each channel; `delta` is a linear map of the state at t before the
sublayer, equal within groups of channels. Both convolutions of a sublayer begin as the identity.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from draftsmith.heads.layers import Attend, DecoderLayer, Rope

# Shapes: B rows, X positions of some blocks, b block size, k taps, H hidden size, C features.


@dataclass(frozen=True)
class ConvolutionOptions:
    """Options of the layers' `BlockConvolution`; none with a size of 0."""

    conv_kernel_size: int = 0
    conv_group_size: int = 16


class BlockConvolution(nn.Module):
    """The convolutions before and after a sublayer."""

    def __init__(self, hidden_size: int, block_size: int, options: ConvolutionOptions) -> None:
        super().__init__()
        taps, group_size = options.conv_kernel_size, options.conv_group_size
        self.block_size, self.group_size = block_size, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group_size), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def forward(self, x_BXH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sublayer's inputs, convolved, and the kernels [B, X, k, H] for its outputs."""
        taps = self.base_kernel.shape[1]
        delta = self.kernel_projection(x_BXH).unflatten(-1, (2, taps, -1)).repeat_interleave(self.group_size, -1)
        before_BXkH, after_BXkH = (self.base_kernel.to(delta.dtype) + delta).unbind(-3)
        return self.convolved(x_BXH, before_BXkH), after_BXkH

    def convolved(self, x_BXH: Tensor, kernels_BXkH: Tensor) -> Tensor:
        """Return the convolution over each block of b positions."""
        x_BAbH = x_BXH.unflatten(1, (-1, self.block_size))
        kernels = kernels_BXkH.unflatten(1, (-1, self.block_size)).unbind(-2)
        out_BAbH = kernels[0] * x_BAbH
        for i, kernel_BAbH in enumerate(kernels[1:], 1):
            out_BAbH = out_BAbH + kernel_BAbH * nn.functional.pad(x_BAbH[:, :, :-i], (0, 0, i, 0))
        return out_BAbH.flatten(1, 2)


class ConvolutionLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and MLP; features are not convolved."""

    def __init__(
        self, config: LlamaConfig, layer: int, block_size: int, options: ConvolutionOptions, *, sinks: bool = False
    ) -> None:
        super().__init__(config, layer, qk_norm=True, sinks=sinks)
        self.attention_conv = BlockConvolution(config.hidden_size, block_size, options)
        self.mlp_conv = BlockConvolution(config.hidden_size, block_size, options)

    def forward(
        self,
        x_BTH: Tensor,
        rope: Rope,
        attend: Attend,
        read_Q: Tensor | None = None,
        features_BCH: Tensor | None = None,
    ) -> Tensor:
        assert read_Q is None, "blocks are read whole"
        (read_BTH, kernels), own = self.attention_conv(self.input_layernorm(x_BTH)), None
        if features_BCH is not None:
            read_BTH, own = torch.cat([features_BCH, read_BTH], 1), slice(features_BCH.shape[1], None)
        x_BTH = x_BTH + self.attention_conv.convolved(self.self_attn(read_BTH, rope, attend, own), kernels)
        read_BTH, kernels = self.mlp_conv(self.post_attention_layernorm(x_BTH))
        return x_BTH + self.mlp_conv.convolved(self.mlp(read_BTH), kernels)
